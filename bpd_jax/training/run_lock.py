"""A run folder belongs to one run at a time."""

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

from bpd_jax import progress
from bpd_jax.buckets import BucketPath
from bpd_jax.errors import UserError

FILE_NAME = ".lock"

# Seconds after which the lock of a run on a bucket is another run's to take, unless it
# has been renewed. Whoever holds it renews it four times in this time.
LEASE = 60.0


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Keeps others from training in `folder`, which is made if need be.

    On a file system the lock is `flock`, which the system releases however the process
    ends; the empty file stays. Where the file system has no locks, nothing is kept from
    anyone. Under gs:// it is a lease, see `_leased`.

    Raises:
      UserError: another process holds it, or the folder cannot be written.
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
    """Holds a lock that is an object, written anew four times per `LEASE`.

    Only a writer that names the generation it has seen replaces the object, so of two
    processes one gets it. What a killed process left is not renewed: after `LEASE`
    seconds without a new generation it is taken over, or at once where the process
    died on this machine. A process that was suspended for longer finds that it has
    lost the lock, and ends without saving anything.
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
            # The network may come back before the lease has expired.
            with contextlib.suppress(OSError):
                try:
                    generation = path.write_generation(content, generation)
                except FileExistsError:
                    # So it looks, too, when the answer to the last renewal was lost.
                    found, generation = path.read_generation()
                    if found != content:
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
    """Writes the lock when it is free; returns its generation.

    Raises:
      UserError: another process holds it.
      OSError: it cannot be read or written.
    """
    found, generation = path.read_generation()
    if generation and not _is_dead(found):
        progress.say(
            f"{path} was left by a run that may still be going on: waiting "
            f"{LEASE:.0f} seconds to see",
            sys.stderr,
        )
        end = time.monotonic() + LEASE
        while generation and time.monotonic() < end:
            time.sleep(LEASE / 12)
            before, generation = generation, path.read_generation()[1]
            if generation not in (0, before):
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
        holder = json.loads(content)
        process = int(holder.pop("pid"))
        holder.pop("token")
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
    here = _identity()
    del here["pid"]
    return holder == here and not pathlib.Path(f"/proc/{process}").exists()


def _identity() -> dict[str, str | int]:
    """This process, this boot of this machine, and who else sees the process number."""
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
        f"{path.parent} is in use: another process is training there; let it end, or "
        "choose another --workdir."
    )


def _end(path: BucketPath) -> None:
    """Ends the process at once: a checkpoint saved now would be among another run's."""
    progress.say(
        f"error: {path.parent} has been taken over by another run, as this one did not "
        f"renew its lock for {LEASE:.0f} seconds; nothing more is saved",
        sys.stderr,
    )
    os._exit(1)
