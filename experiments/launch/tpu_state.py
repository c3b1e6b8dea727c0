"""State of a slice request, from gcloud."""

import dataclasses
import enum
import subprocess
import sys
import time
from collections.abc import Callable

from bpd_jax.base.errors import UserError
from experiments.launch.commands import Command
from experiments.launch.tpu_slice import TpuSlice


class Condition(enum.IntEnum):
    """Condition of slices; that of several slices is the greatest.

    READY: usable.
    COMING: being provided, or recovering.
    LOST: preempted.
    STUCK: will not recover without intervention.
    REFUSED: the request has failed.
    ABSENT: there is no request.
    """

    READY = 0
    COMING = 1
    LOST = 2
    STUCK = 3
    REFUSED = 4
    ABSENT = 5


# States of a queued resource and of a TPU VM, from the reference of the Cloud TPU API
# (QueuedResourceState.State, Node.State); all other states are STUCK.
_OF_REQUESTS = {"FAILED": Condition.REFUSED} | dict.fromkeys(
    (
        *("STATE_UNSPECIFIED", "CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES"),
        *("PROVISIONING", "DELETING", "SUSPENDING"),
    ),
    Condition.COMING,
)
_OF_NODES = {
    "READY": Condition.READY,
    "PREEMPTED": Condition.LOST,
    "TERMINATED": Condition.LOST,
} | dict.fromkeys(
    (
        *("STATE_UNSPECIFIED", "CREATING", "STARTING", "RESTARTING", "REIMAGING"),
        *("REPAIRING", "UNHIDING", "DELETING"),
    ),
    Condition.COMING,
)
# Attempts to query a state, and the seconds between two of them.
_QUESTIONS = 5
PAUSE = 5.0


@dataclasses.dataclass(frozen=True)
class Status:
    """The condition of a request, and the state that it derives from.

    Attributes:
      condition: of all slices together.
      detail: such as `paper is WAITING_FOR_RESOURCES`.
    """

    condition: Condition
    detail: str = ""


# Runs a command; returns its exit status, stdout and stderr.
Asker = Callable[[Command], tuple[int, str, str]]


def ask(command: Command) -> tuple[int, str, str]:
    """Runs a command without printing it."""
    try:
        done = subprocess.run(
            command.words, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UserError(
            f"{command.words[0]} is not installed here: install the Google Cloud CLI."
        ) from None
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def read_status(
    tpu: TpuSlice,
    asker: Asker = ask,
    *,
    pause: float = PAUSE,
    sleep: Callable[[float], object] = time.sleep,
) -> Status:
    """Queries the state of a request and its slices.

    Args:
      tpu: the slices.
      asker: runs a command.
      pause: seconds between two queries, if gcloud fails.
      sleep: waits for a number of seconds.

    Raises:
      UserError: gcloud cannot report the state; the slices may still be usable.
    """
    state = _state(tpu.describe(), asker, pause, sleep)
    if state is None:
        return Status(Condition.ABSENT, f"{tpu.name} does not exist")
    if state == "SUSPENDED":
        # The state of a preempted spot slice. Any other was suspended by an operator.
        condition = Condition.LOST if tpu.spot else Condition.STUCK
        return Status(condition, f"{tpu.name} is SUSPENDED")
    if state != "ACTIVE":
        condition = _OF_REQUESTS.get(state, Condition.STUCK)
        return Status(condition, f"{tpu.name} is {state}")
    worst = Status(Condition.READY, f"{tpu.name} is READY")
    for node in tpu.nodes:
        state = _state(tpu.describe_node(node), asker, pause, sleep) or "TERMINATED"
        condition = _OF_NODES.get(state, Condition.STUCK)
        if condition > worst.condition:
            worst = Status(condition, f"{node} is {state}")
    return worst


def _state(
    command: Command, asker: Asker, pause: float, sleep: Callable[[float], object]
) -> str | None:
    """The state of a resource, None if it does not exist."""
    for number in range(_QUESTIONS):
        if number:
            sleep(pause)
        status, out, err = asker(command)
        if status == 0:
            return out
        if "NOT_FOUND" in err:
            return None
        print(err, file=sys.stderr, flush=True)
    raise UserError(
        f"gcloud cannot report {command.about}: see above; the same command resumes."
    )
