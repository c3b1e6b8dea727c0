"""Programs that outlive the connection that starts them."""

import errno
import fcntl
import os
import pathlib
import platform
import signal
import subprocess
import sys
import types

import pytest

from experiments.launch import detached
from experiments.launch.detached import BUSY, FAILED, STOPPED, UNKNOWN
from tests.commands import wait_for

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPT = ROOT / "experiments" / "launch" / "detached.py"
# Prints, waits for a file, and ends with a status; SIGTERM ends it as it ends training.
WORK = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("begins", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
print("ends", flush=True)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def host(tmp_path):
    """Calls the script in a folder; stops a remaining run at the end."""

    def call(*words, **options):
        words = [sys.executable, SCRIPT, tmp_path / "run", *words]
        options = {"capture_output": True, "text": True, **options}
        return subprocess.run(list(map(str, words)), check=False, **options)

    yield call
    call("stop")
    call("follow", timeout=30)


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """Whether another run cannot start, which `start` finds out without patience."""
    monkeypatch.setattr(detached, "_PATIENCE", detached._POLL)
    return lambda: detached.start(tmp_path / "run", "b", "launch", ["true"]) == BUSY


@pytest.fixture
def work(tmp_path):
    """The command line of a program that waits for `tmp_path / "go"`."""
    return lambda status=0: (sys.executable, "-c", WORK, tmp_path / "go", status)


def follower(tmp_path, **options):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "run"), "follow"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, **options)


def test_run_outlives_its_followers(host, work, tmp_path):
    assert host("start", "a", "launch", *work()).returncode == 0
    with follower(tmp_path, start_new_session=True) as first:
        assert first.stdout.readline() == b"begins\n"
        # The connection breaks and kills the session of the follower.
        os.killpg(first.pid, signal.SIGKILL)
    with follower(tmp_path) as second:
        assert second.stdout.readline() == b"begins\n"
        second.stdout.close()  # a reader that has gone
        (tmp_path / "go").touch()
    result = host("follow", "a")
    assert result.returncode == 0
    assert result.stdout.splitlines()[:2] == ["begins", "ends"]


def test_second_run_is_refused_while_the_first_runs(host, work, tmp_path):
    """`start` waits for the first one for some seconds."""
    assert host("start", "a", "launch", *work()).returncode == 0
    assert host("start", "b", "launch", *work()).returncode == BUSY
    assert host("start", "a", "launch", *work()).returncode == 0
    (tmp_path / "go").touch()
    assert host("follow").returncode == 0
    # A broken connection makes gcloud send a command again: it is not done again.
    assert host("start", "a", "launch", *work()).returncode == 0
    assert host("follow", "a").stdout.count("begins") == 1
    assert host("start", "b", "launch", *work()).returncode == 0
    assert host("follow", "b").returncode == 0
    assert host("follow", "a").returncode == UNKNOWN


def test_failure_is_shown_by_follow_and_report(host, work, tmp_path):
    (tmp_path / "go").touch()
    host("start", "a", "launch", *work(3))
    result = host("follow", "a")
    assert result.returncode == FAILED
    assert "status 3" in result.stdout
    report = host("report")
    assert "ends" in report.stdout
    assert "status 3" in report.stdout
    host("start", "b", "launch", *work(0))
    host("follow", "b")
    assert host("report").stdout == ""


def test_missing_program_is_a_failure(host):
    host("start", "a", "launch", "/no/such/program")
    result = host("follow", "a")
    assert result.returncode == FAILED
    assert "cannot start" in result.stdout


def test_a_run_is_stopped_on_request(host, work, tmp_path):
    host("start", "a", "launch", *work())
    log = tmp_path / "run" / "a.log"
    wait_for(lambda: log.read_text() == "begins\n")
    assert host("stop").returncode == 0
    result = host("follow", "a")
    assert result.returncode == STOPPED
    assert "status 143" in result.stdout


def test_a_run_is_stopped_while_it_starts(host, work, tmp_path):
    """The lock is taken, but the process ID is not written yet."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text('{"id": "a", "words": []}')
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, SCRIPT, folder, "stop"]
        with (
            subprocess.Popen(list(map(str, command))) as stopping,
            subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as run,
        ):
            with pytest.raises(subprocess.TimeoutExpired):
                stopping.wait(timeout=1)
            (folder / "pid").write_text(str(run.pid))
            assert run.wait(timeout=30) == -signal.SIGTERM
            assert stopping.wait(timeout=30) == 0
    assert (folder / "stopped").read_text() == "a"


def test_readers_do_not_count_as_a_run(host, tmp_path):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert host("stop", timeout=30).returncode == 0


def test_a_killed_run_frees_the_lock(host, work, tmp_path):
    host("start", "a", "launch", *work())
    pid = tmp_path / "run" / "pid"
    wait_for(pid.exists)
    # The session of the run; the supervisor leads it.
    os.killpg(int(pid.read_text()), signal.SIGKILL)
    result = host("follow", "a")
    assert result.returncode == FAILED
    assert "killed" in result.stdout
    (tmp_path / "go").touch()
    assert host("start", "b", "launch", *work()).returncode == 0
    assert host("follow", "b").returncode == 0


def test_a_run_without_its_supervisor_keeps_the_lock(host, work, busy, tmp_path):
    host("start", "a", "launch", *work())
    pid = tmp_path / "run" / "pid"
    log = tmp_path / "run" / "a.log"
    wait_for(lambda: pid.exists() and log.read_text() == "begins\n")
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert busy()
    (tmp_path / "go").touch()
    assert host("follow", "a").returncode == FAILED
    assert host("start", "b", "launch", *work()).returncode == 0


def test_a_run_without_its_supervisor_is_stopped(host, work, tmp_path):
    host("start", "a", "launch", *work())
    pid = tmp_path / "run" / "pid"
    log = tmp_path / "run" / "a.log"
    program = tmp_path / "run" / "program"
    wait_for(lambda: program.exists() and log.read_text() == "begins\n")
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert host("stop").returncode == 0
    # The exit status is lost with the supervisor.
    assert host("follow", "a", timeout=30).returncode == STOPPED
    assert "ends" not in log.read_text()


def test_stop_reports_a_run_without_known_processes(tmp_path, monkeypatch, capsys):
    """The program has ended; a process that it started still holds the lock."""
    monkeypatch.setattr(detached, "_START_UP", 0)
    (tmp_path / "run.json").write_text('{"id": "a", "words": []}')
    for name, number in (("pid", os.getpid()), ("program", os.getppid())):
        (tmp_path / name).write_text(str(number))
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert detached.stop(tmp_path) == BUSY
    assert "the process of the run is unknown" in capsys.readouterr().err
    # A launcher that prepares this host to try again does not start the program.
    assert (tmp_path / "stopped").read_text() == "a"


def test_a_second_stop_does_not_interrupt_the_first(host, tmp_path):
    """gcloud sends a command again when the connection breaks."""
    saves = (
        "import signal, sys, time\n"
        "signals = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: signals.append(1))\n"
        "print('begins', flush=True)\n"
        "while not signals: time.sleep(0.02)\n"
        "print('saves', flush=True)\n"
        "time.sleep(2)\n"
        "sys.exit(143 if len(signals) == 1 else 9)\n"
    )
    host("start", "a", "launch", sys.executable, "-c", saves)
    log = tmp_path / "run" / "a.log"
    wait_for(lambda: "begins" in log.read_text())
    busy = host("running")
    assert busy.returncode == BUSY
    assert platform.node() in busy.stdout
    assert host("stop").returncode == 0
    wait_for(lambda: "saves" in log.read_text())
    assert host("stop").returncode == 0
    result = host("follow", "a")
    assert result.returncode == STOPPED
    assert "status 143" in result.stdout
    assert host("running").returncode == 0
    assert "no run is in progress" in host("stop").stdout


def test_nothing_of_a_launch_starts_after_a_stop(host, work, tmp_path):
    (tmp_path / "go").touch()
    assert host("start", "1-1", "1", *work(3)).returncode == 0
    assert host("follow", "1-1").returncode == FAILED
    # The launcher is in its pause.
    assert host("stop").returncode == 0
    refused = host("start", "1-2", "1", *work())
    assert refused.returncode == STOPPED
    assert "stopped on request" in refused.stdout
    assert not (tmp_path / "run" / "1-2.log").exists()
    # gcloud may send the command again that has started the run.
    assert host("start", "1-1", "1", *work()).returncode == 0
    # Another launch, one whose ID begins alike too, may start.
    assert host("start", "12-1", "12", *work()).returncode == 0
    assert host("follow", "12-1").returncode == 0
    assert host("start", "1-2", "1", *work()).returncode == 0
    assert host("follow", "1-2").returncode == 0


def test_nothing_starts_while_a_stop_is_written(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text('{"id": "1-1", "words": []}')
    write = detached._write

    def start_meanwhile(folder, name, text):
        assert detached.start(folder, "1-2", "1", ["true"]) == BUSY
        write(folder, name, text)

    monkeypatch.setattr(detached, "_PATIENCE", 0.3)
    monkeypatch.setattr(detached, "_write", start_meanwhile)
    assert detached.stop(tmp_path) == 0
    assert detached.start(tmp_path, "1-2", "1", ["true"]) == STOPPED


def ended_run(folder, status="143"):
    """The files and the log of a program that has ended."""
    (folder / "run.json").write_text('{"id": "a", "words": []}')
    (folder / "pid").write_text(str(os.getpid()))
    (folder / "status").write_text(status)
    (folder / "a.log").write_text("the log\n")


@pytest.fixture
def at_sleep(monkeypatch):
    """A function that lets `detached` do something instead of its second sleep.

    Its clock advances only by sleeping.
    """

    def prepare(act):
        slept = []

        def sleep(seconds):
            slept.append(seconds)
            if len(slept) == 2:
                act()

        clock = types.SimpleNamespace(sleep=sleep, monotonic=lambda: sum(slept))
        monkeypatch.setattr(detached, "time", clock)
        return slept

    return prepare


def test_a_stop_that_comes_after_the_end_is_awaited(tmp_path, at_sleep):
    """Another worker was told first, upon which all have saved and ended."""
    ended_run(tmp_path)
    slept = at_sleep(lambda: detached.stop(tmp_path))
    assert detached.follow(tmp_path, "a") == STOPPED
    assert len(slept) == 2
    (tmp_path / "stopped").unlink()
    slept = at_sleep(lambda: None)
    # SIGTERM may have come from somebody else.
    assert detached.follow(tmp_path, "a") == FAILED
    assert detached._LATE <= sum(slept) < detached._LATE + 1
    (tmp_path / "status").write_text("1")
    slept = at_sleep(lambda: None)
    assert detached.follow(tmp_path, "a") == FAILED
    assert slept == []


def test_a_new_run_ends_the_wait_for_a_stop(tmp_path, at_sleep):
    ended_run(tmp_path)
    text = '{"id": "b", "words": []}'
    slept = at_sleep(lambda: (tmp_path / "run.json").write_text(text))
    assert detached.follow(tmp_path, "a") == FAILED
    assert len(slept) == 2


def test_full_disk_does_not_prevent_a_stop(host, work, tmp_path, monkeypatch, capsys):
    def full(folder, name, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    host("start", "a", "launch", *work())
    log = tmp_path / "run" / "a.log"
    wait_for(lambda: log.read_text() == "begins\n")
    monkeypatch.setattr(detached, "_write", full)
    assert detached.stop(tmp_path / "run") == FAILED
    assert "No space left on device; end its launcher" in capsys.readouterr().err
    wait_for((tmp_path / "run" / "status").exists)
    assert (tmp_path / "run" / "status").read_text() == "143"
    assert detached.stop(tmp_path / "run") == FAILED


@pytest.mark.parametrize(
    "pid", ["", "x", "-1", "0", "1", "²", "9" * 5000, "\udcff", "PARENT"]
)
def test_damaged_process_numbers_are_not_signalled(tmp_path, monkeypatch, pid):
    def forbidden(number, _):
        assert number == os.getppid(), "sent a signal"
        raise PermissionError  # A process of another user is not the program.

    monkeypatch.setattr(detached, "_START_UP", 0)
    monkeypatch.setattr(os, "kill", forbidden)
    ended_run(tmp_path)
    text = pid.replace("PARENT", str(os.getppid()))
    (tmp_path / "pid").write_bytes(text.encode("utf-8", "surrogateescape"))
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert detached.stop(tmp_path) == BUSY


def test_run_without_a_log_is_followed(tmp_path, capsys):
    ended_run(tmp_path, "0")
    (tmp_path / "a.log").unlink()
    assert detached.follow(tmp_path, "a") == 0
    (tmp_path / "status").write_bytes(b"\xff")
    assert detached.follow(tmp_path, "a") == FAILED
    assert detached.report(tmp_path) == 0
    assert capsys.readouterr().out.count("cannot read the log: ") == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_damaged_description_counts_as_no_run(host, work, tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(text)
    assert host("follow").returncode == UNKNOWN
    assert host("report").stdout == ""
    assert host("stop").returncode == 0
    (tmp_path / "go").touch()
    assert host("start", "b", "launch", *work()).returncode == 0
    assert host("follow", "b").returncode == 0
