"""Runs of several processes: initialization, shares of the data, and agreement.

Every process runs the same program on the devices of its host, and jax joins the
devices into one mesh. All processes can access the run folder. Every decision about the
course of the run must be the same in all processes, or they would wait for each other
forever: they vote on a signal that only one may have received (`StopVote`), and only
the first reads the folder and tells the others (`first`, `agree`).
"""

import collections
import dataclasses
import functools
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.distributed import global_state
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array
from bpd_jax.models.partitioning import BATCH_SPEC, replicated, row_parts

T = TypeVar("T")

# Number of steps after which the host reads a result of a step: large enough for the
# device never to wait for the host, and small enough to stop soon.
LAG = 2

# Environment variables that `srun` sets for every task.
_SLURM = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    detect: bool = False,
    timeout: int = 300,
) -> None:
    """Joins the other processes of the run; does nothing in a run of one process.

    It must be called before jax is asked for its devices. Tasks started by SLURM's
    `srun` are detected.

    Args:
      coordinator_address: host and port of process 0, such as `10.0.0.1:1234`.
      num_processes: number of processes.
      process_id: number of this process, from 0.
      detect: whether jax detects all three, as it can on Cloud TPU and under Open MPI.
      timeout: seconds to wait for the other processes.

    Raises:
      UserError: only some of the three are given, they are invalid, or the other
        processes cannot be reached.
    """
    options: dict[str, Any] = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [name for name, value in options.items() if value is None]
    if missing and len(missing) < len(options):
        raise UserError(
            f"--{missing[0]} is missing: coordinator_address, num_processes and "
            "process_id must be given together or not at all."
        )
    if not missing:
        address, count, index = options.values()
        host, _, port = address.rpartition(":")
        if not (host and port.isdigit() and 0 <= index < count):
            raise UserError(
                f"--coordinator_address={address} must be HOST:PORT, such as "
                f"10.0.0.1:1234, and --process_id={index} from 0 to one less than "
                f"--num_processes={count}."
            )
        if count == 1:
            return
        if index:
            _wait_for(address, timeout)
    elif not detect and not _is_slurm_task():
        return
    # jax would handle SIGTERM itself; here `StopVote` does.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**options, initialization_timeout=timeout)
    except (ValueError, RuntimeError, OSError) as error:
        raise _unreachable(coordinator_address or "an unknown address", error) from (
            error
        )


def _wait_for(address: str, timeout: float) -> None:
    """Waits until process 0 accepts connections; jax would abort if it never does."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise _unreachable(address, error) from error
        time.sleep(0.2)


def _unreachable(address: str, error: Exception) -> UserError:
    reason = str(error).strip().partition("\n")[0][:200]
    return UserError(
        f"cannot join the other processes at {address}: {reason}; check that all of "
        "them are running, with the same address and number of processes."
    )


def _is_slurm_task() -> bool:
    """Whether this process is one of several tasks of an `srun` command."""
    if any(name not in os.environ for name in _SLURM):
        return False
    return int(os.environ["SLURM_NTASKS"]) > 1


@dataclasses.dataclass(frozen=True)
class Membership:
    """This process among those of the run.

    Attributes:
      index: number of the process: on Cloud TPU of its worker, elsewhere of its SLURM
        task or `--process_id`. Process 0 hosts jax's coordinator. On Cloud TPU,
        `jax.process_index()` may count in another order.
      count: number of processes.
      coordinator: host of process 0 by the name under which this process has reached
        it; "" in a run of one process.
      client: jax's client of the coordinator, a key-value store among others.
    """

    index: int
    count: int
    coordinator: str
    client: Any


def membership() -> Membership:
    """This process's place in the run; does not initialize jax's devices."""
    # jax has no public name for it.
    state = global_state
    host = (state.coordinator_address or "").rpartition(":")[0].strip("[]")
    return Membership(state.process_id, state.num_processes, host, state.client)


def check_joined() -> None:
    """Raises a `UserError` if jax sees processes that this one has not joined."""
    if jax.process_count() != membership().count:
        raise UserError(
            f"jax sees {jax.process_count()} processes, which have not joined each "
            "other: pass --distributed in all of them."
        )


def is_first() -> bool:
    """Whether this process is the one that prints and writes files."""
    return membership().index == 0


def agree(value: T) -> T:
    """Returns the value of process 0, which must be JSON, in all processes."""
    if jax.process_count() == 1:
        return value
    share = functools.partial(
        multihost_utils.broadcast_one_to_all, is_source=is_first()
    )
    encoded = np.frombuffer(json.dumps(value).encode(), np.uint8).astype(np.int32)
    size = int(share(np.int32(len(encoded))))
    return json.loads(np.asarray(share(np.resize(encoded, size)), np.uint8).tobytes())


def first(work: Callable[[], T]) -> T | None:
    """Calls a function in process 0; the other processes wait until it returns.

    Returns:
      The result of `work` in process 0, None in the others.

    Raises:
      UserError: `work` raised one in process 0; all processes raise it.
    """
    result, failure = None, None
    if is_first():
        try:
            result = work()
        except UserError as error:
            failure = error
    message = agree(None if failure is None else str(failure))
    if message is not None:
        raise UserError(message) from failure
    return result


def print_once(text: str) -> None:
    """Prints a text in the first process only."""
    if is_first():
        progress.say(text)


def batch_part(mesh: Mesh) -> tuple[int, int]:
    """The index of this process's part of a batch, and the number of parts.

    Processes whose devices are along the `model` axis read the same part. For 8 devices
    in 4 processes of 2, with a mesh of data × model:

        8 × 1   parts 0 1 2 3 of 4
        4 × 2   parts 0 1 2 3 of 4
        2 × 4   parts 0 0 1 1 of 2
        1 × 8   parts 0 0 0 0 of 1

    Raises:
      UserError: the devices of two processes hold rows that only partly overlap.
    """
    count = row_parts(mesh)
    rows: dict[int, set[int]] = collections.defaultdict(set)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    indices: Mapping[Any, Any] = sharding.devices_indices_map((count,))
    for device, (part,) in indices.items():
        rows[device.process_index] |= set(range(*part.indices(count)))
    parts = sorted({tuple(sorted(numbers)) for numbers in rows.values()})
    # jax assigns rows to processes by the same rule.
    if sum(map(len, parts)) != count or len({len(part) for part in parts}) > 1:
        raise UserError(
            f"the mesh {dict(mesh.shape)} splits a batch unevenly across processes: "
            "choose MeshConfig so that the devices of each process hold whole rows."
        )
    return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)


class StopVote:
    """A vote of all processes on stopping, with the same result at the same step.

    A single process decides at once. Several processes compute the result on the
    devices after each step and read it `LAG` steps later, without waiting for it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._any = jax.jit(jnp.any, out_shardings=replicated(mesh))
        self._votes: collections.deque[Array] = collections.deque()

    def __call__(self, stop: bool) -> bool:
        """Casts this process's vote after a step; returns whether to stop now."""
        if jax.process_count() == 1:
            return stop
        flags = jax.make_array_from_callback(
            (self._sharding.mesh.size,), self._sharding, lambda _: np.array([stop])
        )
        self._votes.append(self._any(flags))
        return len(self._votes) > LAG and bool(self._votes.popleft())
