"""Keeps a run alive across preemptions and lost connections."""

import dataclasses
import shutil
import subprocess
import time
from collections.abc import Sequence

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from experiments.launch.command import Command, run
from experiments.launch.tpu_slice import BUSY, FAILED, STOPPED, TpuSlice

# Conditions of slices, the best first.
READY, COMING, LOST, STUCK, ABSENT = range(5)
# States of a queued resource and of a TPU VM, from the reference of the Cloud TPU API
# (QueuedResourceState.State, Node.State); all others are STUCK. SUSPENDED is the state
# of a request whose spot slice was preempted.
_STATES = {
    **dict.fromkeys(("ACTIVE", "READY"), READY),
    **dict.fromkeys(("FAILED", "SUSPENDED", "PREEMPTED", "TERMINATED"), LOST),
    **dict.fromkeys(
        (
            *("STATE_UNSPECIFIED", "CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES"),
            *("PROVISIONING", "DELETING", "SUSPENDING", "STARTING", "RESTARTING"),
            *("REIMAGING", "REPAIRING", "UNHIDING"),
        ),
        COMING,
    ),
}


# Rejected requests, lost connections and failed queries that are retried: for a day.
_REQUESTS = 288


class RunFailedError(UserError):
    """A run failed too often; it is in progress nowhere."""


@dataclasses.dataclass
class Keeper:
    """Runs commands to their end, replacing preempted slices.

    On slices that are ready, a failed command is retried after a pause, in which Cloud
    may report a preemption, from the first command on: training resumes from its newest
    checkpoint. A run is independent of this program: it is followed again after a lost
    connection, and by a second launcher of the same command.
    """

    tpu: TpuSlice
    retries: int = 3
    pause: float = 300.0
    had_slices: bool = False

    def keep(self, prepare: Sequence[Command], start: Command) -> None:
        """Runs `start` and what it starts to the end, after idempotent commands."""
        failures = 0
        while True:
            self._obtain()
            about, code = self._attempt(prepare, start)
            if code == 0:
                return
            if code in (STOPPED, BUSY):
                busy = "runs another command: wait for it, or end it with --stop"
                stopped = "was stopped; the same command resumes the run"
                reason = busy if code == BUSY else stopped
                raise UserError(f"{self.tpu.name} {reason}.")
            time.sleep(self.pause)
            if self._state()[0] != READY:
                continue
            failures += 1
            if failures > self.retries:
                raise (RunFailedError if code == FAILED else UserError)(
                    f"{self.tpu.name} is ready, but {failures} attempts failed, the "
                    f"last with status {code} ({about}): see its output above; the "
                    "same command resumes."
                )

    def delete(self) -> None:
        """Deletes the slices, if there are any."""
        if self._state()[0] != ABSENT and run(self.tpu.delete()):
            raise UserError(
                f"could not delete {self.tpu.name}, which is billed: see gcloud above."
            )

    def _attempt(self, prepare: Sequence[Command], start: Command) -> tuple[str, int]:
        """Prepares, starts and follows a run; what failed, and its exit status."""
        for command in (*prepare, start):
            code = run(command)
            # While a run is in progress nothing is prepared; `start` says whether it is
            # this one.
            if code and (code != BUSY or command is start):
                return command.about, code
        for _ in range(_REQUESTS + 1):
            code = run(self.tpu.follow())
            if code in (0, FAILED, STOPPED):
                break
            progress.say(f"# no connection to {self.tpu.name}: the run continues")
            time.sleep(self.pause)
            if self._state()[0] != READY:
                break
        return "the run", code

    def _state(self) -> tuple[int, str]:
        """See `read_state`; retried while gcloud fails."""
        for _ in range(_REQUESTS):
            try:
                return read_state(self.tpu)
            except UserError as error:
                progress.say(f"# {error}")
                time.sleep(self.pause)
        return read_state(self.tpu)

    def _obtain(self) -> None:
        """Waits for pending slices, requests absent ones and deletes lost ones."""
        refused, shown = 0, ""
        while (state := self._state())[0] != READY:
            condition, detail = state
            if detail != shown:
                progress.say(f"# {detail}")
            shown, code = detail, 0
            if condition == STUCK:
                raise UserError(
                    f"{detail} and does not recover by itself: start it or delete it; "
                    "the same command then resumes."
                )
            if condition != COMING:
                lost = self.tpu.delete("delete lost slices")
                code = run(self.tpu.create() if condition == ABSENT else lost)
                refused += bool(code) or detail.endswith("FAILED")
            # At the first request the user is present to correct it.
            if refused > (_REQUESTS if self.had_slices else 0):
                raise UserError(
                    f"{detail}, and the request was rejected: see gcloud's output "
                    "above; the same command resumes."
                )
            time.sleep(self.pause)
        self.had_slices = True


def read_state(tpu: TpuSlice) -> tuple[int, str]:
    """The condition of slices, the worst of several, and Cloud's state in words."""
    states = {tpu.name: _ask(tpu.describe())}
    if states[tpu.name] == "ACTIVE":
        # A slice of an active request that is gone was preempted.
        gone = "TERMINATED"
        states = {node: _ask(tpu.describe_node(node)) or gone for node in tpu.nodes}
    return max(
        (_STATES.get(state, STUCK), f"{name} is {state}")
        if state
        else (ABSENT, f"{name} does not exist")
        for name, state in states.items()
    )


def _ask(command: Command) -> str | None:
    """The state that gcloud prints; None if the resource does not exist."""
    if shutil.which("gcloud") is None:
        raise UserError("gcloud, the Google Cloud CLI, is not installed.")
    done = subprocess.run(command.words, capture_output=True, text=True, check=False)
    if done.returncode and "NOT_FOUND" not in done.stderr:
        last = done.stderr.strip().rpartition("\n")[2]
        raise UserError(f"gcloud cannot report {command.about}: {last}")
    return None if done.returncode else done.stdout.strip()
