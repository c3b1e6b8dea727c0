"""Runs a program on this host apart from the connection that starts it.

    python3 detached.py FOLDER start ID PROGRAM ARGUMENT…
    python3 detached.py FOLDER follow [ID]
    python3 detached.py FOLDER running
    python3 detached.py FOLDER stop
    python3 detached.py FOLDER report

`start` returns at once; the program continues in a session of its own, whatever becomes
of the connection, and its output goes to FOLDER/ID.log. A second `start` with the same
ID does nothing. While the program runs it holds FOLDER/lock, so that no second one runs
beside it. `follow` prints the log until the program ends, any number of times.
`running` ends with BUSY while a program runs, else with 0. `stop` sends SIGTERM, upon
which training saves and ends. `report` prints the end of the log unless the program
succeeded.

It runs on the hosts of a TPU slice and needs nothing but Python's standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

# Exit statuses: another program runs; the program failed; it was stopped on request;
# the program with this ID is not the latest one.
BUSY, FAILED, STOPPED, UNKNOWN = 75, 76, 77, 78

_POLL = 0.3  # seconds between two looks at the log
_PATIENCE = 3.0  # seconds for which `start` waits for the lock
_START_UP = 60.0  # seconds for which `stop` waits for a program that was just started
_TAIL = 4000  # bytes of an older log that are shown

# What is known of the latest program. Each file has one writer: `start`, the supervisor
# (three of them: its own process ID, the program's, its exit status), `stop`.
_RUN, _STOPPED = "run.json", "stopped"
_PID, _PROGRAM, _STATUS = "pid", "program", "status"


def main(arguments: list[str]) -> int:
    """Does what the command line asks for; returns the exit status."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = pathlib.Path(arguments[0]).expanduser()
    action, *rest = arguments[1:]
    folder.mkdir(parents=True, exist_ok=True)
    if action == "start":
        return start(folder, rest[0], rest[1:])
    if action == "supervise":
        return _supervise(folder, int(rest[0]), rest[1:])
    if action == "follow":
        return follow(folder, rest[0] if rest else None)
    if action == "running":
        return BUSY if _is_running(folder) else 0
    if action == "stop":
        return stop(folder)
    if action == "report":
        return report(folder)
    print(f"unknown action {action!r}", file=sys.stderr)
    return 2


def start(folder: pathlib.Path, name: str, words: list[str]) -> int:
    """Starts a program; returns 0, or BUSY if one with another ID is running."""
    for _ in range(int(_PATIENCE / _POLL)):
        with _lock(folder) as descriptor:
            # The ID is known if the connection broke after an earlier `start`.
            if descriptor is not None and _latest(folder) != name:
                _launch(folder, name, words, descriptor)
            if descriptor is not None:
                return 0
        if _latest(folder) == name:
            return 0
        time.sleep(_POLL)
    return BUSY


def follow(folder: pathlib.Path, name: str | None) -> int:
    """Prints the log until the program ends.

    Args:
      folder: with the lock and the log.
      name: ID of the program; None for the latest.

    Returns:
      0, FAILED, STOPPED or UNKNOWN.
    """
    latest = _latest(folder)
    if latest is None or name not in (None, latest):
        return UNKNOWN
    with (folder / f"{latest}.log").open("rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL))
        running = True
        while running:
            running = _is_running(folder)
            sys.stdout.buffer.write(log.read())
            sys.stdout.buffer.flush()
            if running:
                time.sleep(_POLL)
    status = _read(folder, _STATUS)
    print(f"--- {_describe(folder)}", flush=True)
    if status == "0":
        return 0
    return STOPPED if _read(folder, _STOPPED) == latest else FAILED


def stop(folder: pathlib.Path) -> int:
    """Tells a program that is running to save and end; returns BUSY if it cannot.

    A second `stop` of the same program does nothing: another SIGTERM would interrupt
    its save.
    """
    deadline = time.monotonic() + _START_UP
    if not _is_running(folder):
        print("no run is in progress")
        return 0
    while _is_running(folder):
        # After `start` has taken the lock, the supervisor writes its process ID.
        pid = _read(folder, _PID)
        latest = _latest(folder) or pid  # The description may be damaged.
        if latest and latest == _read(folder, _STOPPED):
            return 0
        if latest and pid:
            _write(folder, _STOPPED, latest)
            if _terminate(folder, int(pid)):
                return 0
            (folder / _STOPPED).unlink(missing_ok=True)
        if time.monotonic() > deadline:
            print(
                "the lock is held, but no process of a run is known: this host may be "
                "being set up; try again",
                file=sys.stderr,
            )
            return BUSY
        time.sleep(_POLL)
    return 0


def report(folder: pathlib.Path) -> int:
    """Prints the end of the log unless the program succeeded."""
    latest = _latest(folder)
    if latest and _read(folder, _STATUS) != "0":
        text = (folder / f"{latest}.log").read_bytes()[-_TAIL:]
        print(f"--- {platform.node()}: {_describe(folder)}")
        print(text.decode("utf-8", "replace"))
    return 0


def _launch(folder: pathlib.Path, name: str, words: list[str], lock: int) -> None:
    """Starts `_supervise`, which inherits the lock, in a session of its own."""
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


def _terminate(folder: pathlib.Path, supervisor: int) -> bool:
    """Sends SIGTERM to the program, or to the supervisor if it starts one."""
    program = _read(folder, _PROGRAM)
    try:
        if program is None:
            os.kill(supervisor, signal.SIGTERM)
        elif os.getpgid(int(program)) == supervisor:
            os.kill(int(program), signal.SIGTERM)
        else:
            return False  # The number belongs to another process now.
    except ProcessLookupError:
        return False
    return True


def _supervise(folder: pathlib.Path, lock: int, words: list[str]) -> int:
    """Runs the program, passes SIGTERM on to it, and keeps its exit status."""
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
        # The program inherits the lock too: it may outlive this process.
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
    # As a shell tells a signal.
    status = 128 - status if status < 0 else status
    try:
        _write(folder, _STATUS, str(status))
    except OSError as error:
        print(f"cannot write that the run ended with {status}: {error}", flush=True)
    return status


@contextlib.contextmanager
def _lock(folder: pathlib.Path, kind: int = fcntl.LOCK_EX) -> Iterator[int | None]:
    """Yields the descriptor of the locked file, None if somebody else holds the lock.

    It is closed at the end; a process that inherited the descriptor keeps the lock.
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
    # Shared, so that two that look at the same time do not see each other.
    with _lock(folder, fcntl.LOCK_SH) as descriptor:
        return descriptor is None


def _latest(folder: pathlib.Path) -> str | None:
    """The ID of the program that was started last.

    None if there is none, or if its description is damaged, as a host that lost power
    may leave it.
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


def _read(folder: pathlib.Path, name: str) -> str | None:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _write(folder: pathlib.Path, name: str, text: str) -> None:
    part = folder / f"{name}.{os.getpid()}.part"
    with part.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(folder / name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
