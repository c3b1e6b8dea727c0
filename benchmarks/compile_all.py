"""Compiles the paper's model and Vicuna for TPUs and GPUs, in several settings.

    bash scripts/compile_env.sh tpu
    .venv-tpu/bin/python -m benchmarks.compile_all
    .venv-tpu/bin/python -m benchmarks.compile_all --only=v4_128
    .venv-tpu/bin/python -m benchmarks.compile_all --missing
    bash scripts/compile_env.sh gpu
    .venv-gpu/bin/python -m benchmarks.compile_all

Runs `bpd_jax.compile` for each of `SETTINGS` whose compiler is installed, which takes
minutes each, and writes the results to one JSON file, with the command of each, date
and versions. Results of other settings are kept. A setting that exceeds the memory is
recorded with the error message.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from absl import flags

from benchmarks import records
from benchmarks.compile_settings import SETTINGS
from bpd_jax.base import cli, progress, provenance
from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import choice, each
from bpd_jax.compilation.compiler import has_compiler

_ONLY = cli.DEFINE_checked(
    "only",
    None,
    "Names of settings; default: all whose compiler is installed.",
    each(choice(*SETTINGS)),
)
_MISSING = flags.DEFINE_bool(
    "missing", False, "Leave out settings whose result is of today's form."
)
_OUTPUT = cli.DEFINE_path(
    "output", "benchmarks/results/compile.json", "JSON file of the results."
)


def main() -> None:
    """Compiles the selected settings."""
    names = _ONLY.value or [
        name for name, (topology, _) in SETTINGS.items() if has_compiler(topology)
    ]
    if not names:
        raise UserError(
            "no compiler is installed here: `bash scripts/compile_env.sh tpu` and "
            "`bash scripts/compile_env.sh gpu` set up environments that have one."
        )
    output = pathlib.Path(_OUTPUT.value)
    results: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    if _MISSING.value:
        names = [name for name in names if not _is_current(results.get(name))]
    for name in progress.bar(names, label="compile"):
        results[name] = compile_one(*SETTINGS[name])
        ordered = {name: results[name] for name in SETTINGS if name in results}
        records.write(output, ordered, indent=1)


def _is_current(result: dict[str, Any] | None) -> bool:
    """Whether a result exists and has the collectives of every program."""
    if result is None:
        return False
    programs = result.get("programs", {}).values()
    return all("collectives" in program for program in programs)


def compile_one(topology: str, settings: list[str]) -> dict[str, Any]:
    """Runs the command; returns its results, or the error message."""
    command = ["-m", "bpd_jax.compile", f"--topology={topology}", *settings]
    about = {
        "command": " ".join(["python", *command]),
        "date": provenance.today(),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "figures.json"
        done = subprocess.run(
            [sys.executable, *command, f"--output={file}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return {**about, **json.loads(file.read_text(encoding="utf-8"))}
    refused = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    if done.returncode != 1 or len(refused) != 1 or "does not fit" not in refused[0]:
        raise UserError(f"{about['command']} failed: {done.stderr[-2000:]}")
    return {**about, "refused": refused[0].removeprefix("error: ")}


if __name__ == "__main__":
    cli.run(main)
