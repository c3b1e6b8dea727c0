"""Entry points as a user calls them, each started once for many command lines."""

import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent

# Importing takes longer than what tests ask for.
_SEVERAL = """
import contextlib, importlib, inspect, io, json, sys
from absl import flags
from bpd_jax import cli
main = importlib.import_module(sys.argv[1]).main
positional = bool(inspect.signature(main).parameters)
done = []
for arguments in json.loads(sys.argv[2]):
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    sys.argv = ["command", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.run(main, positional=positional)
        except SystemExit as end:
            status = end.code or 0
    done.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(done))
"""


class Done(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


def start(module: str, *commands: list[str], folder: pathlib.Path = ROOT) -> list[Done]:
    """Runs an entry point with each list of arguments, in a folder."""
    process = subprocess.run(
        [sys.executable, "-c", _SEVERAL, module, json.dumps(commands)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return [Done(*end) for end in json.loads(process.stdout.splitlines()[-1])]
