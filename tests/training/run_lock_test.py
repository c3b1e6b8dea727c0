import errno
import fcntl
import json
import subprocess
import sys
import threading

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.storage.buckets import as_path
from bpd_jax.training import run_lock
from bpd_jax.training.run_lock import FILE_NAME, locked

HOLD = """
import fcntl, sys
stream = open(sys.argv[1], "a")
fcntl.flock(stream, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_lock_of_a_killed_process_is_released(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / FILE_NAME)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="is in use"), locked(tmp_path):
            pass
        process.kill()
    with locked(tmp_path):
        pass


def test_file_system_without_locks_is_used(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"cannot write .*Not a directory"),
        locked(tmp_path / "file" / "run"),
    ):
        pass


@pytest.fixture
def lock(storage, monkeypatch):
    """The lock of a run under gs://, whose lease is a few seconds."""
    storage.objects["bpd-test"].clear()
    monkeypatch.setattr(run_lock, "LEASE", 4.0)
    return as_path("gs://bpd-test/run") / FILE_NAME


def abandoned_lock(**changes):
    """The content of the lock of a process that was killed."""
    fields = {**run_lock._identity(), "token": "x", **changes}
    return json.dumps(fields).encode()


def test_bucket_is_locked_by_one_run_at_a_time(lock):
    with locked(lock.parent):
        generation = lock.read_generation()[1]
        with pytest.raises(UserError, match="is in use"), locked(lock.parent):
            pass
        assert lock.read_generation()[1] > generation  # It has been renewed.
    assert not lock.exists()
    with locked(lock.parent):
        pass


def test_lock_of_a_dead_local_process_is_taken_at_once(lock, monkeypatch):
    monkeypatch.setattr(run_lock, "LEASE", 600.0)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    lock.write_generation(abandoned_lock(pid=process.pid))
    with locked(lock.parent):
        assert lock.exists()


@pytest.mark.parametrize(
    "content",
    [
        abandoned_lock(host="another"),
        b"",
        b'{"pid": 1e400}',
        b"[" * 100_000,
    ],
    ids=["foreign", "empty", "infinite", "deep"],
)
def test_expired_lock_is_taken(lock, content, capfd, monkeypatch):
    monkeypatch.setattr(run_lock, "LEASE", 0.6)
    lock.write_generation(content)
    with locked(lock.parent):
        assert "waiting" in capfd.readouterr().err
        assert json.loads(lock.read_generation()[0])["host"] != "another"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_whose_lock_was_taken_ends_at_once(lock, monkeypatch):
    ended = threading.Event()

    def end(path):
        ended.set()
        raise SystemExit  # The thread would renew the lock of the other run.

    monkeypatch.setattr(run_lock, "_end", end)
    with locked(lock.parent):
        lock.write_generation(abandoned_lock(host="another"))
        assert ended.wait(10)
    # It does not remove the lock of the other run.
    assert json.loads(lock.read_generation()[0])["host"] == "another"


def test_race_for_an_expired_lock_has_one_winner(lock, storage, monkeypatch):
    monkeypatch.setattr(run_lock, "LEASE", 0.6)
    lock.write_generation(abandoned_lock(host="another"))

    def overtake(name):
        storage.before_upload = lambda name: None
        lock.write_generation(abandoned_lock(host="a third"))

    storage.before_upload = overtake
    with pytest.raises(UserError, match="is in use"), locked(lock.parent):
        pass
