"""The lock of a run folder, which only one run at a time may use."""

import contextlib
import fcntl
import json
import os
import pathlib
import platform
import secrets
import sys
import threading
import time
from collections.abc import Iterator

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.storage import files
from bpd_jax.storage.buckets import BucketPath

FILE_NAME = ".lock"

# Seconds after which another run may take the lock of a run under gs://, unless it has
# been renewed. Its holder renews it four times in this time.
LEASE = 60.0


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Locks `folder`, which is created if it does not exist, against other runs.

    On a file system the lock is `flock`, which the system releases however the process
    ends; the empty file stays. On a file system without locks there is no protection.
    Under gs:// the lock is a lease, see `_leased`.

    Raises:
      UserError: another process holds the lock, or the folder cannot be written.
    """
    path = folder / FILE_NAME
    if isinstance(path, BucketPath):
        with _leased(path):
            yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = path.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(path) from error
        except OSError:
            pass
        yield


@contextlib.contextmanager
def _leased(path: BucketPath) -> Iterator[None]:
    """Holds a lock that is an object, rewritten four times per `LEASE`.

    A write succeeds only if the object still has the generation that the writer has
    read, so only one of two processes gets the lock. The lock of a killed process is no
    longer renewed: another run takes it over after `LEASE` seconds without a new
    generation, or at once if the process has ended on this machine. A process that was
    suspended for longer notices that it has lost the lock, and ends without saving
    anything.
    """
    content = json.dumps({**_identity(), "token": secrets.token_hex(8)}).encode()
    try:
        generation = _take(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    ended = threading.Event()

    def renew() -> None:
        nonlocal generation
        while not ended.wait(LEASE / 4):
            # The network may recover before the lease expires.
            with contextlib.suppress(OSError):
                try:
                    generation = path.write_generation(content, generation)
                except FileExistsError:
                    # Also raised if the response to the last renewal was lost.
                    current, generation = path.read_generation()
                    if current != content:
                        _end(path)

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError):
            if path.read_generation()[0] == content:
                path.unlink()


def _take(path: BucketPath, content: bytes) -> int:
    """Writes the lock if it is free; returns its generation.

    Raises:
      UserError: another process holds the lock.
      OSError: the lock cannot be read or written.
    """
    current, generation = path.read_generation()
    if generation and not _is_dead(current):
        progress.say(
            f"{path} exists, so another run may be using the folder: waiting "
            f"{LEASE:.0f} seconds to see whether it renews the lock",
            sys.stderr,
        )
        end = time.monotonic() + LEASE
        while generation and time.monotonic() < end:
            time.sleep(LEASE / 12)
            previous, generation = generation, path.read_generation()[1]
            if generation not in (0, previous):
                raise _in_use(path)
    try:
        return path.write_generation(content, generation)
    except FileExistsError as error:
        if path.read_generation()[0] == content:
            return path.read_generation()[1]
        raise _in_use(path) from error


def _is_dead(content: bytes) -> bool:
    """Whether the holder of a lock ran on this machine and has ended."""
    try:
        holder = files.parse_json(content)
        process = int(holder.pop("pid"))
        holder.pop("token")
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
    here = _identity()
    del here["pid"]
    return holder == here and not pathlib.Path(f"/proc/{process}").exists()


def _identity() -> dict[str, str | int]:
    """Identifies this process: host, boot of the host, PID namespace and PID."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return {
            "host": platform.node(),
            "boot": boot.read_text(encoding="utf-8").strip(),
            "namespace": os.readlink("/proc/self/ns/pid"),
            "pid": os.getpid(),
        }
    return {"host": platform.node(), "pid": os.getpid()}


def _in_use(path: pathlib.Path) -> UserError:
    return UserError(
        f"{path.parent} is in use: another process is training there; wait until it "
        "has finished, or choose another --workdir."
    )


def _end(path: BucketPath) -> None:
    """Ends the process at once, so that it saves nothing to another run's folder."""
    progress.say(
        f"error: another run has taken over {path.parent}, because this run did not "
        f"renew its lock for {LEASE:.0f} seconds; nothing more is saved",
        sys.stderr,
    )
    os._exit(1)
