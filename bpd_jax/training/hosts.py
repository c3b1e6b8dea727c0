"""Runs of one process or of several, which agree, feed rows and end together.

All decisions are those of process 0, which alone reads and writes the run folder;
otherwise processes would wait for each other forever. It hosts jax's coordination
service, which ends the others when one has sent no heartbeat for a while, and agrees on
the step after which a run stops.
"""

import collections
import contextlib
import functools
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.jax_private import process_count, process_id, start_preemption_service
from bpd_jax.models.partitioning import BATCH_SPEC, row_parts
from bpd_jax.storage import folders

T = TypeVar("T")


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    detect: bool = False,
    timeout: int = 300,
    heartbeat_timeout: int = 100,
) -> None:
    """Joins the other processes of the run, before jax is asked for its devices.

    Does nothing in a run of one process. Tasks of SLURM's `srun` are detected.

    Args:
      coordinator_address: host and port of process 0, such as `10.0.0.1:1234`.
      detect: whether jax detects all three, as it can on Cloud TPU and under Open MPI.
      timeout: seconds to wait for the other processes.
      heartbeat_timeout: seconds without a heartbeat after which a process is dead.
    """
    given = (coordinator_address, num_processes, process_id)
    host, _, port = (coordinator_address or "").rpartition(":")
    if given != (None, None, None):
        index, limit = -1 if process_id is None else process_id, num_processes or 0
        if not (host and port.isdigit() and 0 <= index < limit):
            raise UserError(
                f"coordinator_address, num_processes, process_id = {given} must be "
                "given together: HOST:PORT, a number, and one from 0 to below it."
            )
        if num_processes == 1:
            return
    elif not detect:
        # Only `srun` sets the list of nodes of a step.
        tasks = int(os.environ.get("SLURM_NTASKS", 1))
        if tasks == 1 or "SLURM_STEP_NODELIST" not in os.environ:
            return
    try:
        if process_id:
            _wait_for(host.strip("[]"), int(port), timeout)
        # It would take SIGTERM from commands that do not ask for it.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            *given,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=heartbeat_timeout,
        )
    except (ValueError, RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise UserError(
            "cannot join the other processes at "
            f"{coordinator_address or 'an unknown address'}: {reason}; check that all "
            "of them are running, with the same address and number of processes."
        ) from error


def _wait_for(host: str, port: int, timeout: float) -> None:
    """Waits until process 0 accepts connections; jax would abort if it never does."""
    end = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.2)


def check_joined() -> None:
    """Checks that this process has joined all that jax sees."""
    if jax.process_count() != count():
        raise UserError(
            f"jax sees {jax.process_count()} processes, which have not joined each "
            "other: pass --distributed in all of them."
        )


def count() -> int:
    """Number of processes; does not initialize jax's devices."""
    return process_count()


def is_first() -> bool:
    """Whether this is process 0, which prints and writes files."""
    return process_id() == 0


def batch_part(mesh: Mesh) -> tuple[int, int]:
    """The index of this process's part of a batch, and the number of parts.

    Processes whose devices are along the `model` axis read the same part: of 4 with 2
    devices each, with data × model = 4 × 2, they read 0 1 2 3; with 2 × 4, 0 0 1 1.
    """
    size = row_parts(mesh)
    rows: dict[int, set[int]] = collections.defaultdict(set)
    indices: Any = NamedSharding(mesh, BATCH_SPEC).devices_indices_map((size,))
    for device, (part,) in indices.items():
        rows[device.process_index] |= set(range(*part.indices(size)))
    parts = sorted({tuple(sorted(numbers)) for numbers in rows.values()})
    # jax assigns rows to processes by the same rule.
    if sum(map(len, parts)) != size or len({len(part) for part in parts}) > 1:
        raise UserError(
            f"the mesh {dict(mesh.shape)} splits a batch unevenly across processes: "
            "choose MeshConfig so that the devices of each process hold whole rows."
        )
    return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)


def agree(value: T) -> T:
    """Returns the value of process 0, which must be JSON, in all processes."""
    if jax.process_count() == 1:
        return value
    broadcast = multihost_utils.broadcast_one_to_all
    share = functools.partial(broadcast, is_source=is_first())
    encoded = np.frombuffer(json.dumps(value).encode(), np.uint8).astype(np.int32)
    size = int(share(np.int32(len(encoded))))
    return json.loads(np.asarray(share(np.resize(encoded, size)), np.uint8).tobytes())


def first(work: Callable[[], T]) -> T | None:
    """Calls a function in process 0; the other processes wait until it returns.

    It returns None in the others, and raises in all of them what `work` raises (in the
    others a `UserError` with its message).
    """
    result = failure = None
    if is_first():
        try:
            result = work()
        except BaseException as error:  # Also Ctrl-C, which ends the others, too.
            failure = error
    message = agree(failure and (str(failure) or type(failure).__name__))
    if failure is not None:
        raise failure
    if message is not None:
        raise UserError(message)
    return result


@contextlib.contextmanager
def only_writers(folder: pathlib.Path) -> Iterator[None]:
    """Refuses another run in a folder while this one writes to it."""
    with contextlib.ExitStack() as stack:
        first(lambda: stack.enter_context(folders.only_writer(folder)))
        yield


def print_once(text: str) -> None:
    """Prints a text in the first process only."""
    if is_first():
        progress.say(text)


@contextlib.contextmanager
def deferred_signals() -> Iterator[Callable[[int], int]]:
    """Defers SIGTERM, SIGINT and SIGHUP, unless they are ignored, to the end of a step.

    The second signal has its usual effect. In a run of several processes SIGTERM
    belongs to jax from here on, and the others are passed on as SIGTERM.

    Yields a function that is called after every step with its number. It returns the
    number of the signal that ends the run now, or 0, in all processes alike.
    """
    received: list[int] = []
    shared = count() > 1
    if shared:
        start_preemption_service()

    def stop(step: int) -> int:
        if not shared:
            return received[0] if received else 0
        # jax agrees on a step about a second after one process has received SIGTERM.
        reached = multihost_utils.reached_preemption_sync_point(step)
        return int(signal.SIGTERM) if reached else 0

    def receive(number: int, _: object) -> None:
        received.append(number)
        restore()
        if shared:
            signal.raise_signal(signal.SIGTERM)

    def restore() -> None:
        for kind, handler in previous.items():
            signal.signal(kind, handler or signal.SIG_DFL)  # None: not from Python

    kinds = [signal.SIGINT, signal.SIGHUP, *[signal.SIGTERM] * (not shared)]
    if threading.current_thread() is not threading.main_thread():
        kinds = []  # Only the main thread may set handlers.
    handlers = {kind: signal.getsignal(kind) for kind in kinds}
    previous = {k: h for k, h in handlers.items() if h != signal.SIG_IGN}
    for kind in previous:
        signal.signal(kind, receive)
    try:
        yield stop
    finally:
        restore()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Ends this process at once if the body fails, in a run of several processes.

    jax's own shutdown would wait for the others, which wait for this process. They end
    because their operation fails, or when this process has sent no heartbeat for long.
    So does the exit after a signal: then all processes end at the same step.
    """
    try:
        yield
    except SystemExit as error:
        if count() == 1 or not isinstance(error.code, int):
            raise
        _end(error.code)
    except (Exception, KeyboardInterrupt) as error:
        if count() == 1:
            raise
        if isinstance(error, jax.errors.JaxRuntimeError):
            reason = str(error).partition("\n")[0][:200]
            error = UserError(
                f"an operation of all processes failed ({reason}): see the output of "
                "the others; start the run again to resume from the last checkpoint."
            )
        with contextlib.suppress(OSError):
            if isinstance(error, UserError | KeyboardInterrupt):
                text = str(error) or "interrupted"
                print(f"error: {text}", file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
        _end(130 if isinstance(error, KeyboardInterrupt) else 1)


def _end(status: int) -> NoReturn:
    """Ends this process without jax's shutdown."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if is_first():  # The others, which would abort without it, end first.
        time.sleep(5)
    os._exit(status)
