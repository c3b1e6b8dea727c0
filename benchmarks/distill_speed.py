"""Tokens per second of `distill`: a model's own texts, in batches.

    python -m benchmarks.distill_speed --prompts_file=questions.jsonl --prompts=128
    python -m benchmarks.distill_speed --prompts_file=questions.jsonl \\
        --other=../earlier/bpd_jax

Every round continues the prompts once, and then the same prompts twice; the difference
of the times is that of generating, without start and compilation, which a first round
has done. With `--other`, the folder of another checkout is measured in turn, by the
same Python and in the precision of the model.
"""

import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import flags

from benchmarks import records
from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError
from bpd_jax.data.generations import open_generations

MODEL = cli.DEFINE_path("model", "smollm2", "the model.")
PROMPTS_FILE = cli.DEFINE_path("prompts_file", None, "JSON Lines with prompts.")
PROMPTS = flags.DEFINE_integer("prompts", 128, "number of prompts.", lower_bound=1)
OTHER = cli.DEFINE_path("other", None, "folder of the package of another checkout.")
ROUNDS = flags.DEFINE_integer("rounds", 2, "rounds.", lower_bound=1)
BATCH = flags.DEFINE_integer("batch_size", 64, "rows of a batch.", lower_bound=1)
TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "of a text.", lower_bound=1)
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/distill_speed_cpu.json", "file.")

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "bpd_jax"


def seconds_and_tokens(
    package: pathlib.Path, prompts: pathlib.Path, arguments: list[str]
) -> tuple[float, int]:
    """Runs the command; returns its time and its number of new tokens."""
    with tempfile.TemporaryDirectory() as folder:
        texts = pathlib.Path(folder) / "texts"
        begin = time.perf_counter()
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "bpd_jax.distill", f"--output={texts}"),
                *(f"--model={MODEL.value}", f"--prompts_file={prompts}"),
                *(f"--batch_size={BATCH.value}", f"--max_new_tokens={TOKENS.value}"),
                *arguments,
            ],
            cwd=package.parent,
            env={**os.environ, "PYTHONPATH": os.fspath(package.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - begin
        if ended.returncode:
            raise UserError(f"{package} fails: {ended.stderr.strip()[-300:]}")
        generations = open_generations(texts)
        lengths = [len(generations[row]) for row in range(len(generations))]
        return seconds, sum(lengths) - int(np.sum(generations.prompt_lengths))


def main() -> None:
    """Measures the checkouts in turn; prints and writes tokens per second."""
    contenders = {"stored": (_PACKAGE, []), "int8": (_PACKAGE, ["--precision=int8"])}
    if OTHER.value:
        contenders["other"] = (pathlib.Path(OTHER.value).resolve(), [])
    lines = pathlib.Path(cli.required("prompts_file")).read_text().splitlines()
    lines = lines[: PROMPTS.value]
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        once, twice = (pathlib.Path(folder) / f"{times}.jsonl" for times in (1, 2))
        once.write_text("\n".join(lines))
        twice.write_text("\n".join(lines * 2))
        rounds = [*itertools.product(range(ROUNDS.value + 1), contenders)]
        for number, name in progress.bar(rounds, label="rounds"):
            run = [
                seconds_and_tokens(contenders[name][0], path, contenders[name][1])
                for path in (once, twice)[: 1 if number == 0 else 2]
            ]
            if number:
                (seconds, tokens), (longer, more) = run
                rates[name].append((more - tokens) / (longer - seconds))
    result = {
        name: {
            "tokens_per_second": round(statistics.median(of_name), 1),
            "of_rounds": [round(rate, 1) for rate in of_name],
        }
        for name, of_name in rates.items()
    }
    print(json.dumps(result, indent=2))
    settings = {
        "prompts": len(lines),
        "batch_size": BATCH.value,
        "max_new_tokens": TOKENS.value,
        "rounds": ROUNDS.value,
    }
    about = records.about("distill_speed")
    records.write(OUTPUT.value, {**about, **settings, "contenders": result})


if __name__ == "__main__":
    cli.run(main)
