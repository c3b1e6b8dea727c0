"""Several processes, one run: how they meet, share out the data and agree.

Every process runs the same program on the devices of its host, and jax joins them into
one mesh. The run folder lies on a file system that all of them reach. Whatever decides
how the run goes on must come out the same in all of them, or they wait for each other
forever: a signal that only one has received is put to the vote (`StopVote`), and what a
folder holds is looked at by the first alone (`first`, `agree`).
"""

import collections
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bpd_jax import progress
from bpd_jax.errors import UserError
from bpd_jax.models.partitioning import BATCH_SPEC, replicated
from bpd_jax.typing import Array

T = TypeVar("T")

# Steps that the host is ahead of the device when it looks at a result of it: enough for
# the device never to wait, and few enough to stop soon.
LAG = 2

# What `srun` sets for every task that it starts.
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
    """Joins the other processes of the run; does nothing where there are none.

    It comes before anything else that asks jax for its devices. Tasks that SLURM's
    `srun` started find each other by themselves.

    Args:
      coordinator_address: host and port of process 0, such as `10.0.0.1:1234`.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      detect: let jax find all three, as it can on Cloud TPU and under Open MPI.
      timeout: seconds to wait for the others.

    Raises:
      UserError: only some of the three are given, they do not fit, or the others
        cannot be reached.
    """
    given: dict[str, Any] = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise UserError(
            f"--{missing[0]} is missing: coordinator_address, num_processes and "
            "process_id are given together or not at all."
        )
    if not missing:
        _check(given)
        if num_processes == 1:
            return
        if process_id:
            _wait_for(str(coordinator_address), timeout)
    elif not detect and not _is_slurm_task():
        return
    # jax would take SIGTERM for itself; here the processes agree on a signal.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**given, initialization_timeout=timeout)
    except (ValueError, RuntimeError, OSError) as error:
        raise _unreachable(coordinator_address or "an unknown address", error) from (
            error
        )


def _wait_for(address: str, timeout: float) -> None:
    """Waits until process 0 listens; jax itself would abort where it never does."""
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
        "them run, with the same address and number of processes."
    )


def _check(given: dict[str, Any]) -> None:
    address, count, index = given.values()
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"--coordinator_address={address} is not HOST:PORT, such as 10.0.0.1:1234."
        )
    if not isinstance(count, int) or count < 1:
        raise UserError(f"--num_processes={count} must be 1 or more.")
    if not isinstance(index, int) or not 0 <= index < count:
        raise UserError(f"--process_id={index} must be from 0 to {count - 1}.")


def _is_slurm_task() -> bool:
    """Whether this is one of several tasks of one `srun`."""
    if any(name not in os.environ for name in _SLURM):
        return False
    return int(os.environ["SLURM_NTASKS"]) > 1


def own_host() -> str:
    """The address at which other hosts reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Chooses the interface of the default route; nothing is sent.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def is_first() -> bool:
    """Whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


def agree(value: T) -> T:
    """What process 0 has, in all of them; it must be JSON."""
    if jax.process_count() == 1:
        return value
    own_bytes = np.frombuffer(json.dumps(value).encode(), np.uint8).astype(np.int32)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(own_bytes))))
    shared = multihost_utils.broadcast_one_to_all(np.resize(own_bytes, size))
    return json.loads(np.asarray(shared, np.uint8).tobytes())


def first(work: Callable[[], T]) -> T | None:
    """Lets process 0 do something with files; the others wait until it is done.

    Returns:
      In process 0 what `work` returns, in the others None.

    Raises:
      UserError: `work` raised one, in process 0; all raise it, so that none waits.
    """
    done, trouble = None, None
    if is_first():
        try:
            done = work()
        except UserError as error:
            trouble = error
    words = agree(None if trouble is None else str(trouble))
    if words is not None:
        raise UserError(words) from trouble
    return done


def say(text: str) -> None:
    """Prints, in the first process only."""
    if is_first():
        progress.say(text)


def batch_part(mesh: Mesh) -> tuple[int, int]:
    """Which part of every batch this process reads, and how many parts there are.

    Processes whose devices split a layer (`model`) read the same part. A mesh of 8
    devices in 4 processes of 2, as data × model:

        8 × 1   parts 0 1 2 3 of 4
        4 × 2   parts 0 1 2 3 of 4
        2 × 4   parts 0 0 1 1 of 2
        1 × 8   parts 0 0 0 0 of 1

    Raises:
      UserError: the devices of two processes hold rows that only partly overlap.
    """
    count = mesh.shape["data"] * mesh.shape["fsdp"]
    rows: dict[int, set[int]] = collections.defaultdict(set)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    places: Mapping[Any, Any] = sharding.devices_indices_map((count,))
    for device, (place,) in places.items():
        rows[device.process_index] |= set(range(*place.indices(count)))
    parts = sorted({tuple(sorted(held)) for held in rows.values()})
    # jax hands out a process's rows by the same rule.
    if sum(map(len, parts)) != count or len({len(part) for part in parts}) > 1:
        raise UserError(
            f"the mesh {dict(mesh.shape)} splits a batch across processes unevenly: "
            "choose MeshConfig so that the devices of a process hold whole rows of it."
        )
    return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)


class StopVote:
    """Whether any process wants to stop; all learn of it at the same step.

    One process alone is obeyed at once. Several vote with each step, as one number
    computed on the devices, which is read when it has long been there.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._any = jax.jit(jnp.any, out_shardings=replicated(mesh))
        self._votes: collections.deque[Array] = collections.deque()

    def __call__(self, wish: bool) -> bool:
        """Takes this process's wish after a step, and tells whether to stop there."""
        if jax.process_count() == 1:
            return wish
        flags = jax.make_array_from_callback(
            (self._sharding.mesh.size,), self._sharding, lambda _: np.array([wish])
        )
        self._votes.append(self._any(flags))
        return len(self._votes) > LAG and bool(self._votes.popleft())
