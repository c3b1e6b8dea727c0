"""Flags of commands that several processes run together, and how these join.

SLURM's `srun` is detected; every worker of a TPU slice needs --distributed; elsewhere
each process gets the three flags of its address, the number of processes and its own.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from absl import flags

from bpd_jax.base import cli, progress
from bpd_jax.base.configuration import Parsed
from bpd_jax.training import hosts

T = TypeVar("T")

_COORDINATOR = flags.DEFINE_string(
    "coordinator_address", None, "Host and port of process 0 of several processes."
)
_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.")
_PROCESS = flags.DEFINE_integer("process_id", None, "Index of this process, from 0.")
_HEARTBEAT = flags.DEFINE_integer(
    "heartbeat_timeout", 100, "Seconds after which a silent process counts as dead.", 1
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Let jax detect the other processes, as on Cloud TPU."
)


def join() -> None:
    """Joins the other processes that the flags or the environment name, if any."""
    hosts.initialize(
        _COORDINATOR.value,
        _PROCESSES.value,
        _PROCESS.value,
        detect=_DISTRIBUTED.value,
        heartbeat_timeout=_HEARTBEAT.value,
    )


def with_mesh_if_set(parsed: Parsed[T]) -> T:
    """The configuration, whose `mesh` is None unless a setting or a process needs it.

    Starts jax, and checks that this process has joined all that it sees.

    Args:
      parsed: a configuration whose field `mesh` is `@MeshConfig()` by default.
    """
    hosts.check_joined()
    config: Any = parsed.value
    is_set = any(
        each.owner.endswith("MeshConfig") or each.name.endswith(".mesh")
        for each in parsed.settings
    )
    used = is_set or hosts.count() > 1
    return config if used else dataclasses.replace(config, mesh=None)


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """Joins the other processes; the first alone prints within."""
    join()
    with hosts.together():
        if not hosts.is_first():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # It stays open.
            progress.hide()
        yield


def run(main: Callable[..., None], *, positional: bool = False) -> None:
    """`cli.run` for a command that several processes may run together.

    All of them do the same; process 0 alone prints and writes.
    """

    def joined(*arguments: list[str]) -> None:
        with joining():
            main(*arguments)

    cli.run(joined, positional=positional)
