import errno
import fcntl
import subprocess
import sys

import pytest

from bpd_jax.errors import UserError
from bpd_jax.training.run_lock import FILE_NAME, locked

HOLD = """
import fcntl, sys
stream = open(sys.argv[1], "a")
fcntl.flock(stream, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_gives_its_lock_back(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / FILE_NAME)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="is in use"), locked(tmp_path):
            pass
        other.kill()
    with locked(tmp_path):
        pass


def test_a_file_system_without_locks_is_used_as_it_is(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"cannot write .*Not a directory"),
        locked(tmp_path / "file" / "run"),
    ):
        pass
