"""What the TPU compiler says of the paper's model and of Vicuna, slice by slice.

    bash scripts/tpu_env.sh
    .venv-tpu/bin/python -m benchmarks.tpu_compile
    .venv-tpu/bin/python -m benchmarks.tpu_compile --only=v4_128

Runs `bpd_jax.compile` once for each of `SETTINGS`, minutes each, and puts the figures
in one JSON file, with the command of each, date and versions. Settings that are not run
again keep what the file has of them. One that the compiler refuses is kept with the
sentence that it is refused with.
"""

import datetime
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from absl import flags

from benchmarks.tpu_settings import SETTINGS
from bpd_jax import cli, progress
from bpd_jax.errors import UserError
from bpd_jax.files import replacing_file

_ONLY = flags.DEFINE_list("only", None, "Names of settings; all if not given.")
_OUTPUT = flags.DEFINE_string(
    "output", "benchmarks/results/tpu_compile.json", "JSON file of the figures."
)


def main() -> None:
    """Compiles what is asked for."""
    names = _ONLY.value or list(SETTINGS)
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        raise UserError(
            f"--only={','.join(unknown)} is not known: there is {', '.join(SETTINGS)}."
        )
    output = pathlib.Path(_OUTPUT.value)
    results: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    for name in progress.bar(names, label="compile"):
        results[name] = compile_one(*SETTINGS[name])
        ordered = {name: results[name] for name in SETTINGS if name in results}
        with replacing_file(output) as path:
            path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def compile_one(topology: str, settings: list[str]) -> dict[str, Any]:
    """Runs the command; returns its figures, or the sentence of its refusal."""
    command = ["-m", "bpd_jax.compile", f"--topology={topology}", *settings]
    about = {
        "command": " ".join(["python", *command]),
        "date": datetime.date.today().isoformat(),
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
