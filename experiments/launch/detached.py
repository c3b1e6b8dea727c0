"""Runs a program on this host, detached from the connection that starts it.

    python3 detached.py FOLDER start ID LAUNCH PROGRAM ARGUMENT…
    python3 detached.py FOLDER follow [ID]
    python3 detached.py FOLDER running
    python3 detached.py FOLDER stop
    python3 detached.py FOLDER report

`start` returns immediately; the program runs in a session of its own, which survives
the connection, and its output is appended to FOLDER/ID.log. A second `start` with the
same ID does nothing. A running program holds FOLDER/lock, so that only one runs at a
time. `follow` prints the log until the program ends and can be repeated. `running`
exits with BUSY while a program runs, else with 0. `stop` sends SIGTERM, on which
training saves a checkpoint and exits. It also marks the latest program as stopped,
whether or not it is running; `start` then exits with STOPPED if the ID of that program
begins with LAUNCH and a hyphen, so that a launcher does not restart a stopped run.
`report` prints the end of the log unless the program succeeded.

It runs on the hosts of a TPU slice and needs only Python's standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

# Exit statuses: another program is running; the program failed; it was stopped on
# request; the program with this ID is not the latest one.
BUSY, FAILED, STOPPED, UNKNOWN = 75, 76, 77, 78

_POLL = 0.3  # polling interval of the log, in seconds
_PATIENCE = 3.0  # seconds for which `start` waits for the lock
_START_UP = 60.0  # seconds for which `stop` waits for a program that is starting
# Seconds for which `follow` waits for a `stop` after SIGTERM has ended the program: all
# workers exit as soon as one of them gets the signal, and the `stop` of this worker may
# arrive later.
_LATE = 60.0
_TERMINATED = str(128 + signal.SIGTERM)
_TAIL = 4000  # bytes of an older log that are shown

# Files that describe the latest program. Each has a single writer: `start` (run.json),
# the supervisor (its process ID, the program's process ID and its exit status), and
# `stop` (stopped).
_RUN, _STOPPED = "run.json", "stopped"
_PID, _PROGRAM, _STATUS = "pid", "program", "status"


def main(arguments: list[str]) -> int:
    """Executes the action on the command line; returns the exit status."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = pathlib.Path(arguments[0]).expanduser()
    action, *rest = arguments[1:]
    folder.mkdir(parents=True, exist_ok=True)
    if action == "start":
        return start(folder, rest[0], rest[1], rest[2:])
    if action == "supervise":
        return _supervise(folder, int(rest[0]), rest[1:])
    if action == "follow":
        return follow(folder, rest[0] if rest else None)
    actions = {"running": running, "stop": stop, "report": report}
    if action in actions:
        return actions[action](folder)
    print(f"unknown action {action!r}", file=sys.stderr)
    return 2


def start(folder: pathlib.Path, name: str, launch: str, words: list[str]) -> int:
    """Starts a program.

    Args:
      folder: folder of the lock and the log.
      name: ID of the program.
      launch: prefix of the IDs of all programs that one launcher starts.
      words: the program and its arguments.

    Returns:
      0, BUSY if a program with another ID is running, or STOPPED if one of this launch
      was stopped on request.
    """
    for _ in range(int(_PATIENCE / _POLL)):
        with _lock(folder) as descriptor:
            if descriptor is not None:
                # An earlier `start` succeeded, but its connection was lost.
                if _latest(folder) == name:
                    return 0
                if (_read(folder, _STOPPED) or "").startswith(f"{launch}-"):
                    print("not started: the run was stopped on request")
                    return STOPPED
                _launch(folder, name, words, descriptor)
                return 0
        if _latest(folder) == name:
            return 0
        time.sleep(_POLL)
    return BUSY


def follow(folder: pathlib.Path, name: str | None) -> int:
    """Prints the log until the program ends.

    Args:
      folder: folder of the lock and the log.
      name: ID of the program; None for the latest.

    Returns:
      0, FAILED, STOPPED or UNKNOWN.
    """
    latest = _latest(folder)
    if latest is None or name not in (None, latest):
        return UNKNOWN
    with _open_log(folder, latest) as log:
        in_progress = True
        while in_progress:
            in_progress = _is_running(folder)
            sys.stdout.buffer.write(log.read())
            sys.stdout.buffer.flush()
            if in_progress:
                time.sleep(_POLL)
    status = _read(folder, _STATUS)
    print(f"--- {_describe(folder)}", flush=True)
    if status == "0":
        return 0
    deadline = time.monotonic() + (_LATE if status == _TERMINATED else 0)
    while _read(folder, _STOPPED) != latest:
        if time.monotonic() >= deadline or _latest(folder) != latest:
            return FAILED
        time.sleep(_POLL)
    return STOPPED


def running(folder: pathlib.Path) -> int:
    """Returns BUSY and prints the host name while a program is running, else 0."""
    if not _is_running(folder):
        return 0
    print(f"{platform.node()}: a run is in progress, the latest is {_latest(folder)}")
    return BUSY


def stop(folder: pathlib.Path) -> int:
    """Sends SIGTERM to a running program, and marks it as stopped.

    A second `stop` of the same program does nothing: another SIGTERM would interrupt
    its save.

    Returns:
      0, BUSY if the program's process ID is unknown, or FAILED if the mark cannot be
      written, in which case the launcher may restart the program.
    """
    deadline = time.monotonic() + _START_UP
    while True:
        # A shared lock keeps programs from starting, and does not exclude readers.
        with _lock(folder, fcntl.LOCK_SH) as descriptor:
            if descriptor is not None:
                print("no run is in progress")
                latest = _latest(folder)
                return 0 if latest is None or _mark_stopped(folder, latest) else FAILED
        # After `start` has taken the lock, the supervisor writes its process ID.
        pid = _read_pid(folder, _PID)
        if pid is not None:
            latest = _latest(folder) or str(pid)  # The description may be damaged.
            if latest == _read(folder, _STOPPED):
                if _signal(folder, pid, 0):
                    return 0
            else:
                # The signal is sent even if the disk is full.
                marked = _mark_stopped(folder, latest)
                if _signal(folder, pid, signal.SIGTERM):
                    return 0 if marked else FAILED
        if time.monotonic() > deadline:
            print(
                "the lock is held, but the process of the run is unknown: the set-up "
                "of this host may be in progress; try again",
                file=sys.stderr,
            )
            return BUSY
        time.sleep(_POLL)


def report(folder: pathlib.Path) -> int:
    """Prints the end of the log unless the program succeeded."""
    latest = _latest(folder)
    if latest and _read(folder, _STATUS) != "0":
        with _open_log(folder, latest) as log:
            text = log.read()
        print(f"--- {platform.node()}: {_describe(folder)}")
        print(text.decode("utf-8", "replace"))
    return 0


def _launch(folder: pathlib.Path, name: str, words: list[str], lock: int) -> None:
    """Starts `_supervise`, which inherits the lock, in a new session."""
    for file in (_PID, _PROGRAM, _STATUS, _STOPPED):
        (folder / file).unlink(missing_ok=True)
    _write(folder, _RUN, json.dumps({"id": name, "words": words}))
    with (folder / f"{name}.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, __file__, str(folder), "supervise", str(lock), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[lock],
        )


def _signal(folder: pathlib.Path, supervisor: int, number: int) -> bool:
    """Sends a signal to the program, or to the supervisor that is starting it.

    Signal 0 only checks that the process exists. Returns whether it exists.
    """
    program = _read_pid(folder, _PROGRAM)
    try:
        if program is None:
            os.kill(supervisor, number)
        elif os.getpgid(program) == supervisor:
            os.kill(program, number)
        else:
            return False  # The process ID has been reused,
    except (ProcessLookupError, PermissionError):
        return False  # or reused by another user.
    return True


def _supervise(folder: pathlib.Path, lock: int, words: list[str]) -> int:
    """Runs the program, forwards SIGTERM to it, and writes its exit status."""
    programs: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, _: object) -> None:
        asked.append(number)
        for program in programs:
            program.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    with contextlib.suppress(OSError):  # The disk may be full.
        _write(folder, _PID, str(os.getpid()))
    try:
        # The program also inherits the lock, because it may outlive this process.
        programs.append(subprocess.Popen(words, pass_fds=[lock]))
    except OSError as error:
        print(f"cannot start {words[0]}: {error}", file=sys.stderr)
        status = 127
    else:
        with contextlib.suppress(OSError):
            _write(folder, _PROGRAM, str(programs[0].pid))
        if asked:
            programs[0].send_signal(asked[0])
        status = programs[0].wait()
    # The convention of shells for death by signal.
    status = 128 - status if status < 0 else status
    try:
        _write(folder, _STATUS, str(status))
    except OSError as error:
        print(f"cannot write the exit status {status} of the run: {error}", flush=True)
    return status


@contextlib.contextmanager
def _lock(folder: pathlib.Path, kind: int = fcntl.LOCK_EX) -> Iterator[int | None]:
    """Yields the descriptor of the lock file, None if another process holds the lock.

    It is closed on exit; a process that inherited the descriptor keeps the lock.
    """
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def _is_running(folder: pathlib.Path) -> bool:
    # A shared lock, so that concurrent readers do not exclude each other.
    with _lock(folder, fcntl.LOCK_SH) as descriptor:
        return descriptor is None


def _latest(folder: pathlib.Path) -> str | None:
    """The ID of the program that was started last.

    None if there is none, or if its description is damaged, for example by a power
    failure.
    """
    try:
        return str(json.loads(_read(folder, _RUN) or "")["id"])
    except (ValueError, KeyError, TypeError):
        return None


def _describe(folder: pathlib.Path) -> str:
    if _is_running(folder):
        return "the run is still in progress"
    status = _read(folder, _STATUS)
    if status is None:
        return "the run was killed, or its host restarted"
    return f"the run ended with status {status}"


def _open_log(folder: pathlib.Path, name: str) -> BinaryIO:
    """Opens the end of a program's log; an unreadable log is replaced by a message."""
    try:
        log = (folder / f"{name}.log").open("rb")
    except (OSError, ValueError) as error:
        return io.BytesIO(f"--- cannot read the log: {error}\n".encode())
    log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL))
    return log


def _read(folder: pathlib.Path, name: str) -> str | None:
    """The text of a file; None if it is missing or cannot be read."""
    try:
        return (folder / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _read_pid(folder: pathlib.Path, name: str) -> int | None:
    """The process ID in a file; None if there is none, or the file is damaged."""
    text = _read(folder, name) or ""
    valid = text.isascii() and text.isdigit() and len(text) < 10
    # A signal is never sent to 0 (this process's group) or 1 (`init`).
    return int(text) if valid and int(text) > 1 else None


def _mark_stopped(folder: pathlib.Path, name: str) -> bool:
    """Marks a program as stopped on request; returns whether that could be written."""
    try:
        _write(folder, _STOPPED, name)
    except OSError as error:
        print(
            f"cannot mark the run as stopped: {error}; end its launcher with Ctrl-C, "
            "otherwise it restarts the run",
            file=sys.stderr,
        )
        return False
    return True


def _write(folder: pathlib.Path, name: str, text: str) -> None:
    part = folder / f"{name}.{os.getpid()}.part"
    with part.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(folder / name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
