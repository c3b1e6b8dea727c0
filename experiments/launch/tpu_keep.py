"""Keeps a run alive across preemptions and lost connections."""

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Natural, NonNegative, Validated
from experiments.launch.commands import Command, Runner, run
from experiments.launch.detached import BUSY, FAILED, STOPPED, UNKNOWN
from experiments.launch.tpu_slice import TpuSlice
from experiments.launch.tpu_state import PAUSE, Condition, Status, read_status

# Errors are counted over so many seconds: a run of several days may fail occasionally.
WINDOW = 6 * 3600.0
_DELETIONS = 3  # attempts to delete slices


class NoSlicesError(UserError):
    """No slices can be obtained."""


class RunEndedError(UserError):
    """A run has ended before its last step and is not restarted.

    After any other error the run may still be in progress.
    """


class StoppedError(RunEndedError):
    """A run was stopped on request."""


@dataclasses.dataclass(frozen=True)
class Patience(Validated):
    """Limits on retries.

    Attributes:
      retries: number of failed attempts within six hours, on slices that are ready,
        that are retried.
      requests: number of rejected requests, or of consecutive lost connections or
        failed queries, that are retried, one every `pause`.
      pause: seconds between two attempts. Cloud reports the preemption of a slice with
        a delay.
    """

    prefix = "--"

    retries: Natural = 3
    requests: Natural = 288
    pause: NonNegative = 300.0


@dataclasses.dataclass
class Keeper:
    """Trains to the last step, replacing preempted slices.

    Preempted slices are requested again, any number of times. On slices that are ready,
    a failed command is retried after a pause, starting from the first command: training
    resumes from its newest checkpoint. The run is independent of this program: it is
    followed again after a lost connection, and a run that an earlier launcher started
    is followed to its end first. While the network or gcloud fails, this program waits.

    Attributes:
      tpu: the slices.
      run: prints and runs a command, and returns its exit status.
      status: returns the state of the slices.
      patience: limits on retries.
      delete: whether to delete the slices when the run has ended, also after an error.
      stopped: returns whether a stop was requested while no run was in progress.
      sleep: waits for a number of seconds.
      clock: a monotonic clock, in seconds.
    """

    tpu: TpuSlice
    run: Runner
    status: Callable[[], Status]
    patience: Patience = Patience()
    delete: bool = False
    stopped: Callable[[], bool] = lambda: False
    sleep: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def train(
        self,
        prepare: Sequence[Command],
        words: tuple[str, ...],
        name: str,
        launch: str | None = None,
    ) -> None:
        """Trains to the last step.

        Args:
          prepare: commands that prepare slices; they are idempotent.
          words: the command that trains.
          name: ID of the run; a hyphen and a number are added for every attempt.
          launch: prefix of the IDs of all runs of this launcher, followed by a hyphen;
            by default `name`. If one of them was stopped, no other is started.

        Raises:
          NoSlicesError: no slices can be obtained.
          RunEndedError: training failed, or was stopped on request.
          UserError: the slices cannot be reached or set up; a run may be in
            progress there.
        """
        try:
            self._train(prepare, words, name, name if launch is None else launch)
        except RunEndedError as error:
            if self.delete:
                progress.say(f"error: {error}")
                self.give_back()
            raise
        if self.delete:
            self.give_back()

    def give_back(self) -> None:
        """Deletes the slices.

        Raises:
          UserError: gcloud fails.
        """
        delete = self.tpu.delete()
        for attempt in range(_DELETIONS):
            if attempt:
                self.sleep(self.patience.pause)
            if self.run(delete) == 0:
                return
        raise UserError(
            f"could not delete {self.tpu.name}, which is still billed: see gcloud's "
            f"output above, and run {delete.line}"
        )

    def known_status(self) -> Status:
        """The state of the slices; retries while gcloud fails.

        Raises:
          UserError: gcloud failed too often.
        """
        unanswered = 0
        while True:
            try:
                return self.status()
            except UserError:
                unanswered += 1
                if unanswered > self.patience.requests:
                    raise
            progress.say(
                f"# gcloud cannot report the state of {self.tpu.name}: a run there "
                "continues"
            )
            self.sleep(self.patience.pause)

    def _train(
        self,
        prepare: Sequence[Command],
        words: tuple[str, ...],
        name: str,
        launch: str,
    ) -> None:
        attempt = 0
        failures: list[float] = []
        busy = False
        self._request_first()
        while True:
            self._obtain()
            self._check_stopped()
            attempt += 1
            start = self.tpu.start(words, f"{name}-{attempt}", launch)
            about, code = self._do([*prepare, start])
            if code == STOPPED:
                raise self._stopped()
            again, busy = busy, code == BUSY
            if busy:
                progress.say(f"# a run is still in progress on {self.tpu.name}")
                # If the run hangs on another worker, the first worker may not have it
                # and returns the status of an earlier run immediately.
                if self._follow() not in (FAILED, UNKNOWN) and not again:
                    self.sleep(self.patience.pause)
                    continue
            if code == 0:
                about = "training"
                code = self._follow(f"{name}-{attempt}")
            if code == 0:
                return
            self.sleep(self.patience.pause)
            if self.known_status().condition is not Condition.READY:
                continue
            if code in (FAILED, UNKNOWN):
                self.run(self.tpu.report())
            if code == BUSY:
                self.run(self.tpu.running("all"))
            now = self.clock()
            failures = [*(then for then in failures if now - then < WINDOW), now]
            if len(failures) > self.patience.retries:
                # Only FAILED implies that no worker is training any more.
                kind = RunEndedError if code == FAILED else UserError
                why = "see its output above; the same command resumes"
                if code == BUSY:
                    why = (
                        "a run is in progress on the workers named above; --stop ends "
                        "it, then the same command resumes"
                    )
                raise kind(
                    f"{self.tpu.name} is ready, but {len(failures)} attempts failed, "
                    f"the last with status {code} ({about}): {why}."
                )

    def wait(self) -> None:
        """Waits for the end of a run that an earlier launcher started, if any.

        Raises:
          UserError: the slices cannot be reached, or the run was stopped on request.
        """
        if self.known_status().condition is not Condition.READY:
            return
        if self._over_connections(self.tpu.running(), (0, BUSY)) == BUSY:
            self._follow()

    def _do(self, commands: Sequence[Command]) -> tuple[str, int]:
        """Runs commands until one fails; returns its purpose and its status."""
        for command in commands:
            code = self.run(command)
            if code:
                return command.about, code
        return "", 0

    def _check_stopped(self) -> None:
        if self.stopped():
            raise self._stopped()

    def _stopped(self) -> StoppedError:
        return StoppedError(
            f"the run on {self.tpu.name} was stopped; the same command resumes it."
        )

    def _follow(self, attempt: str = "") -> int:
        """Follows a run to its end, reconnecting when a connection is lost.

        Args:
          attempt: ID of the run; by default the latest.

        Returns:
          0, FAILED, UNKNOWN, or the status of the last connection if the slices are
          lost.
        """
        answers = (0, FAILED, UNKNOWN, STOPPED)
        code = self._over_connections(self.tpu.follow(attempt), answers)
        if code == STOPPED:
            raise self._stopped()
        return code

    def _over_connections(self, command: Command, answers: Collection[int]) -> int:
        """Repeats a command on workers until its connection is not lost.

        Returns:
          One of `answers`, or the status of the last connection if the slices are lost.

        Raises:
          UserError: the connection was lost too often.
        """
        broken = 0
        while (code := self.run(command)) not in answers:
            broken += 1
            if broken > self.patience.requests:
                raise UserError(
                    f"{self.tpu.name} could not be reached {broken} times, the last "
                    f"with status {code}: the run continues there, and the same "
                    "command follows it."
                )
            progress.say(f"# no connection to {self.tpu.name}: the run continues")
            self.sleep(self.patience.pause)
            if self.known_status().condition is not Condition.READY:
                return code
        return code

    def _request_first(self) -> None:
        """Requests slices if there are none; errors are raised to the user."""
        if self.known_status().condition is not Condition.ABSENT:
            return
        create = self.tpu.create()
        code = self.run(create)
        if code:
            raise NoSlicesError(
                f"could not {create.about}: gcloud ended with status {code}."
            )
        if (now := self.known_status()).condition is Condition.REFUSED:
            raise NoSlicesError(
                f"{now.detail}: {self.tpu.describe().line} shows the reason."
            )

    def _obtain(self) -> None:
        """Waits for pending slices and replaces lost ones.

        Raises:
          NoSlicesError: the slices cannot recover, or too many requests were rejected.
        """
        refused = 0
        shown = ""
        answered: Condition | None = None
        while (now := self.known_status()).condition is not Condition.READY:
            self._check_stopped()
            if now.condition is Condition.STUCK:
                raise NoSlicesError(
                    f"{now.detail} and does not recover by itself: start it, or delete "
                    f"it with {self.tpu.delete().line}; the same command then resumes."
                )
            if now.condition is Condition.COMING:
                if now.detail != shown:
                    progress.say(f"# {now.detail}: waiting")
                shown = now.detail
                self.sleep(self.patience.pause)
                continue
            if now.condition is answered:
                # The last command succeeded but has not taken effect yet.
                self.sleep(self.patience.pause)
                answered = None
                continue
            absent = now.condition is Condition.ABSENT
            code = self.run(self.tpu.create() if absent else self.tpu.delete())
            if code or now.condition is Condition.REFUSED:
                refused += 1
                if refused >= self.patience.requests:
                    raise NoSlicesError(
                        f"{refused} requests for {self.tpu.name} were rejected: see "
                        "gcloud's output above; the same command resumes."
                    )
                self.sleep(self.patience.pause)
                answered = None
            else:
                answered = now.condition


def stop_runs(tpus: Sequence[TpuSlice], pause: float = PAUSE) -> None:
    """Saves and ends the runs on slices; absent slices are skipped.

    Args:
      tpus: the slices.
      pause: seconds between two queries, if gcloud fails.

    Raises:
      UserError: some could not be stopped.
    """
    failed = []
    for tpu in tpus:
        try:
            now = read_status(tpu, pause=pause)
        except UserError as error:
            progress.say(f"error: {error}")
            failed.append(tpu.name)
            continue
        if now.condition is not Condition.READY:
            progress.say(f"# {now.detail}: nothing was stopped")
        elif run(tpu.stop()):
            failed.append(tpu.name)
    if failed:
        raise UserError(f"could not stop {', '.join(failed)}: see gcloud's output.")
