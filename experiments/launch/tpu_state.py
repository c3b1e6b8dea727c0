"""What has become of a request for slices, as gcloud tells it."""

import dataclasses
import enum
import subprocess
import sys
import time
from collections.abc import Callable

from bpd_jax.errors import UserError
from experiments.launch.commands import Command
from experiments.launch.tpu_slice import TpuSlice


class Condition(enum.IntEnum):
    """What can be done with slices; of several slices the greatest counts.

    READY: they can be used.
    COMING: they are on their way, or come back by themselves.
    LOST: Cloud has taken them back.
    STUCK: they do not come back by themselves.
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
# (QueuedResourceState.State, Node.State); those that are not named are STUCK.
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
# Times that a state is asked for before giving up, and the seconds between two of them.
_QUESTIONS = 5
PAUSE = 5.0


@dataclasses.dataclass(frozen=True)
class Status:
    """What can be done now, and why.

    Attributes:
      condition: of all slices together.
      detail: such as `paper is WAITING_FOR_RESOURCES`.
    """

    condition: Condition
    detail: str = ""


# Runs a command; returns its exit status, what it printed and its errors.
Asker = Callable[[Command], tuple[int, str, str]]


def ask(command: Command) -> tuple[int, str, str]:
    """Runs a command without showing it."""
    try:
        done = subprocess.run(
            command.words, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UserError(
            f"there is no {command.words[0]} here: install the Google Cloud CLI."
        ) from None
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def read_status(
    tpu: TpuSlice,
    asker: Asker = ask,
    *,
    pause: float = PAUSE,
    sleep: Callable[[float], object] = time.sleep,
) -> Status:
    """What has become of a request and its slices.

    Args:
      tpu: the slices.
      asker: runs a command.
      pause: seconds between two questions, if gcloud cannot tell.
      sleep: waits for so many seconds.

    Raises:
      UserError: gcloud cannot tell, which is no reason to give the slices up.
    """
    state = _state(tpu.describe(), asker, pause, sleep)
    if state is None:
        return Status(Condition.ABSENT, f"{tpu.name} is not there")
    if state == "SUSPENDED":
        # So Cloud takes back a spot slice. Any other is taken by somebody.
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
    """A state, None if there is no such thing."""
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
        f"gcloud cannot tell {command.about}: see above; the same command resumes."
    )
