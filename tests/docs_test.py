"""The Python in docs/ngrams.md runs as it stands, after the command above it."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "ngrams.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_tour_runs(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorflow")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (command,) = blocks("bash")
    words = shlex.split(command.replace("\\\n", "").partition("\npython ")[2])
    built = run(*words)
    assert "before pruning" in built
    program = "\n".join(blocks("python"))
    printed = run("-c", program)
    scores = [float(found) for found in re.findall(r"^refined +(\S+)", printed, re.M)]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    drawn = (tmp_path / "runs" / "tour" / "lattice.html").read_text()
    assert drawn.count('class="path"') == 4  # two in the legend, two in the picture
