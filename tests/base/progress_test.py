"""Progress bars, and output to streams that are closed or full."""

import contextlib
import fcntl
import io
import os
import subprocess
import sys
import time

import pytest

from bpd_jax.base import progress

WORK = """
import sys
from bpd_jax.base import progress
progress.say("begins")
for number in progress.bar(range(3), label="counting"):
    progress.say(f"number {number}")
open(sys.argv[1], "w").write("done")
"""


def work(file, out, err):
    """Runs `WORK` with these streams; returns its exit status."""
    command = [sys.executable, "-c", WORK, str(file)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.run(
        command, stdout=out, stderr=err, env=environment, timeout=120, check=False
    ).returncode


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for end in (read, write):
        with contextlib.suppress(OSError):
            os.close(end)


def test_a_closed_pipe_does_not_end_the_work(tmp_path, pipe):
    read, write = pipe
    os.close(read)
    assert work(tmp_path / "file", write, write) == 0
    assert (tmp_path / "file").read_text() == "done"


def test_a_full_pipe_does_not_block(tmp_path, pipe):
    _, write = pipe
    flags = fcntl.fcntl(write, fcntl.F_GETFL)
    fcntl.fcntl(write, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 512)
    fcntl.fcntl(write, fcntl.F_SETFL, flags)
    assert work(tmp_path / "file", write, write) == 0
    assert (tmp_path / "file").read_text() == "done"


def test_lines_and_bar_are_written_to_files(tmp_path):
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        assert work(tmp_path / "file", out, err) == 0
    lines = ["begins", "number 0", "number 1", "number 2"]
    assert (tmp_path / "out").read_text().splitlines() == lines
    assert "counting" in (tmp_path / "err").read_text()
    assert "3/3" in (tmp_path / "err").read_text()


def test_what_is_going_on_is_said_after_a_while(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with progress.waiting("compiling", 0.01):
        deadline = time.monotonic() + 60
        while not said.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said.getvalue() == "compiling\n"
    with progress.waiting("compiling", 60):
        pass
    assert said.getvalue() == "compiling\n"
