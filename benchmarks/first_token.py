"""Time of `bpd decode` from its start to its end, 16 tokens.

    python -m benchmarks.first_token
    python -m benchmarks.first_token --other=../earlier/bpd_jax

Every round starts the command twice in a cache of its own: with nothing compiled, and
with what the first start has left. With `--other`, the folder of another checkout is
measured in turn, by the same Python.
"""

import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

from benchmarks import records
from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError

OTHER = flags.DEFINE_string("other", None, "folder of the package of another checkout.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "starts of each kind.", lower_bound=1)
PROMPT = flags.DEFINE_string("prompt", "What is rain?", "the prompt.")
OUTPUT = flags.DEFINE_string(
    "output", "benchmarks/results/first_token_cpu.json", "file."
)

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "bpd_jax"


def start(package: pathlib.Path, cache: str) -> dict[str, float]:
    """Runs the command; returns its seconds: of the clock and of all processors."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.fspath(package.parent),
        "JAX_COMPILATION_CACHE_DIR": cache,
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "bpd_jax.decode", "--model=smollm2"),
            *(f"--prompt={PROMPT.value}", "--max_new_tokens=16"),
        ],
        cwd=package.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begin
    if ended.returncode:
        raise UserError(f"{package} does not decode: {ended.stderr.strip()[-300:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "processor_seconds": used}


def medians(starts: list[dict[str, float]]) -> dict[str, float]:
    """Medians of each number."""
    return {
        name: round(statistics.median(one[name] for one in starts), 2)
        for name in starts[0]
    }


def main() -> None:
    """Measures the checkouts in turn; prints and writes the medians."""
    packages = {"this": _PACKAGE}
    if OTHER.value:
        packages["other"] = pathlib.Path(OTHER.value).resolve()
    kinds = [
        f"{name}, {kind}" for name in packages for kind in ("not cached", "cached")
    ]
    starts: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    rounds = [*packages.items()] * ROUNDS.value
    for name, package in progress.bar(rounds, label="starts"):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("not cached", "cached"):
                starts[f"{name}, {kind}"].append(start(package, cache))
    result = {kind: medians(of_kind) for kind, of_kind in starts.items()}
    print(json.dumps(result, indent=2))
    about = records.about("first_token")
    records.write(OUTPUT.value, {**about, "rounds": ROUNDS.value, "starts": result})


if __name__ == "__main__":
    cli.run(main)
