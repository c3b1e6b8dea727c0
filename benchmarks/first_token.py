"""Time and memory of `bpd decode` from its start to its end, 16 tokens.

    python -m benchmarks.first_token
    python -m benchmarks.first_token --model=model.gguf --precision=int8
    python -m benchmarks.first_token --other=../earlier/bpd_jax

Every round starts the command twice in a cache of its own: with nothing compiled, and
with what the first start has left. With `--other`, the folder of another checkout is
measured in turn, by the same Python.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

from benchmarks import records
from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError

OTHER = cli.DEFINE_path("other", None, "folder of the package of another checkout.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "starts of each kind.", lower_bound=1)
MODEL = cli.DEFINE_path("model", "smollm2", "the model.")
PRECISION = flags.DEFINE_string("precision", None, "of `bpd decode`.")
PROMPT = flags.DEFINE_string("prompt", "What is rain?", "the prompt.")
OUTPUT = cli.DEFINE_path("output", "benchmarks/results/first_token_cpu.json", "file.")

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "bpd_jax"


def start(package: pathlib.Path, cache: str) -> dict[str, float]:
    """Runs the command; returns its seconds: of the clock and of all processors.

    `memory_mb` is the resident memory at its end, `most_memory_mb` the most it had.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.fspath(package.parent),
        "JAX_COMPILATION_CACHE_DIR": cache,
    }
    options = [f"--precision={PRECISION.value}"] if PRECISION.value else []
    with tempfile.TemporaryFile("w+") as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "bpd_jax.decode", f"--model={MODEL.value}"),
                *(f"--prompt={PROMPT.value}", "--max_new_tokens=16", *options),
            ],
            cwd=package.parent,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        memory = 0.0
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            memory = resident(process.pid) or memory
            time.sleep(0.02)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        if process.returncode:
            errors.seek(0)
            said = errors.read().strip()[-300:].rpartition("error: ")[2]
            raise UserError(f"`bpd decode` of {package} fails: {said}")
    used = ended[2]
    return {
        "seconds": seconds,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "memory_mb": memory,
        "most_memory_mb": used.ru_maxrss / 1000,
    }


def resident(pid: int) -> float | None:
    """Resident memory of a process in MB; None after its end."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    sizes = [line.split()[1] for line in status.splitlines() if line[:6] == "VmRSS:"]
    return int(sizes[0]) / 1000 if sizes else None


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
    about = {**records.about("first_token"), "model": pathlib.Path(MODEL.value).name}
    about["precision"] = PRECISION.value
    records.write(OUTPUT.value, {**about, "rounds": ROUNDS.value, "starts": result})


if __name__ == "__main__":
    cli.run(main)
