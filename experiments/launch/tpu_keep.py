"""Keeps training going on TPU slices, whatever becomes of slices and connections."""

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence

from bpd_jax import progress
from bpd_jax.errors import UserError
from bpd_jax.settings import Natural, NonNegative, Validated
from experiments.launch.commands import Command, Runner, run
from experiments.launch.detached import BUSY, FAILED, STOPPED, UNKNOWN
from experiments.launch.tpu_slice import TpuSlice
from experiments.launch.tpu_state import PAUSE, Condition, Status, read_status

# Errors count together if they happen within so many seconds: a run of days may break
# off now and then.
WINDOW = 6 * 3600.0
_DELETIONS = 3  # times that slices are given back before giving up


class NoSlicesError(UserError):
    """There are no slices to be had, whatever is to be trained on them."""


class RunEndedError(UserError):
    """A run has ended before its last step and is not started again.

    After any other error it may still be running.
    """


class StoppedError(RunEndedError):
    """A run was stopped on request."""


@dataclasses.dataclass(frozen=True)
class Patience(Validated):
    """When to give up.

    Attributes:
      retries: errors, within six hours and on slices that are there, before giving up
        at the next one.
      requests: refused requests, or broken connections or questions without an answer
        one after another, before giving up; one every `pause`.
      pause: seconds between two attempts. Cloud tells the state of a slice that it
        takes back only after a while.
    """

    prefix = "--"

    retries: Natural = 3
    requests: Natural = 288
    pause: NonNegative = 300.0


@dataclasses.dataclass
class Keeper:
    """Trains to the end, on as many slices as it takes.

    Slices that Cloud has taken back are requested again, however often. On slices that
    are there, what ends with an error is tried again after a pause, from the first
    command on: training resumes from its newest checkpoint. The run does not depend on
    this program: it is followed again after a broken connection, and a run that is at
    work from an earlier time is waited for. While the network or gcloud fails, this
    program waits too.

    Attributes:
      tpu: the slices.
      run: shows and runs a command, and returns its exit status.
      status: what has become of the slices.
      patience: when to give up.
      delete: whether to give the slices back when the run has ended, well or not.
      stopped: whether somebody asked for the end while no run is in progress.
      sleep: waits for so many seconds.
      clock: seconds since some moment.
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
        """Trains to the end.

        Args:
          prepare: commands that prepare slices, which may be done again.
          words: the command that trains.
          name: ID of the run; a hyphen and a number are added for every attempt.
          launch: begins the IDs of all runs of this launcher, before a hyphen; by
            default `name`. If one of them was stopped, no other is started.

        Raises:
          NoSlicesError: there is no slice to be had.
          RunEndedError: training fails by itself, or was stopped on request.
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
          UserError: gcloud does not.
        """
        delete = self.tpu.delete()
        for attempt in range(_DELETIONS):
            if attempt:
                self.sleep(self.patience.pause)
            if self.run(delete) == 0:
                return
        raise UserError(
            f"could not give {self.tpu.name} back, which is still paid for: see "
            f"gcloud's output above, and run {delete.line}"
        )

    def known_status(self) -> Status:
        """What has become of the slices, as soon as gcloud can tell.

        Raises:
          UserError: it could not for too long.
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
                f"# gcloud cannot tell the state of {self.tpu.name}: a run there "
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
                # Of a run that hangs on another worker the first one may know nothing:
                # it then tells at once how an earlier one ended.
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
                # Only then no worker trains any more.
                kind = RunEndedError if code == FAILED else UserError
                why = "its output above says why; the same command resumes"
                if code == BUSY:
                    why = (
                        "a run is in progress on the workers named above; --stop ends "
                        "it, then the same command resumes"
                    )
                raise kind(
                    f"{self.tpu.name} is there, but {len(failures)} attempts failed, "
                    f"the last with status {code} ({about}): {why}."
                )

    def wait(self) -> None:
        """Waits for the end of a run in progress from an earlier time, if any.

        Raises:
          UserError: the slices cannot be reached, or the run was stopped on request.
        """
        if self.known_status().condition is not Condition.READY:
            return
        if self._over_connections(self.tpu.running(), (0, BUSY)) == BUSY:
            self._follow()

    def _do(self, commands: Sequence[Command]) -> tuple[str, int]:
        """Runs commands until one fails; what that one is for, and its status."""
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
        """Follows a run to its end, over as many connections as it takes.

        Args:
          attempt: ID of the run; by default the latest.

        Returns:
          0, FAILED, UNKNOWN, or the status of a connection that broke for good.
        """
        answers = (0, FAILED, UNKNOWN, STOPPED)
        code = self._over_connections(self.tpu.follow(attempt), answers)
        if code == STOPPED:
            raise self._stopped()
        return code

    def _over_connections(self, command: Command, answers: Collection[int]) -> int:
        """Runs a command on workers again until no connection breaks.

        Returns:
          One of `answers`, or the status of the last connection if the slices are lost.

        Raises:
          UserError: the connection broke too often.
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
        """Requests slices if there are none; an error is the user's to mend."""
        if self.known_status().condition is not Condition.ABSENT:
            return
        create = self.tpu.create()
        code = self.run(create)
        if code:
            raise NoSlicesError(
                f"could not {create.about}: gcloud ended with status {code}."
            )
        if (now := self.known_status()).condition is Condition.REFUSED:
            raise NoSlicesError(f"{now.detail}: {self.tpu.describe().line} says why.")

    def _obtain(self) -> None:
        """Waits for slices that are on their way, replaces those that are lost.

        Raises:
          NoSlicesError: they do not come back, or requests are refused again and again.
        """
        refused = 0
        shown = ""
        answered: Condition | None = None
        while (now := self.known_status()).condition is not Condition.READY:
            self._check_stopped()
            if now.condition is Condition.STUCK:
                raise NoSlicesError(
                    f"{now.detail} and does not come back by itself: start it, or give "
                    f"it back with {self.tpu.delete().line}; the same command then "
                    "resumes."
                )
            if now.condition is Condition.COMING:
                if now.detail != shown:
                    progress.say(f"# {now.detail}: waiting")
                shown = now.detail
                self.sleep(self.patience.pause)
                continue
            if now.condition is answered:
                # Cloud has yet to act on a command that succeeded.
                self.sleep(self.patience.pause)
                answered = None
                continue
            absent = now.condition is Condition.ABSENT
            code = self.run(self.tpu.create() if absent else self.tpu.delete())
            if code or now.condition is Condition.REFUSED:
                refused += 1
                if refused >= self.patience.requests:
                    raise NoSlicesError(
                        f"{refused} requests for {self.tpu.name} were refused: "
                        "gcloud's output above says why; the same command resumes."
                    )
                self.sleep(self.patience.pause)
                answered = None
            else:
                answered = now.condition


def stop_runs(tpus: Sequence[TpuSlice], pause: float = PAUSE) -> None:
    """Saves and ends what runs on slices; those that are not there are skipped.

    Args:
      tpus: the slices.
      pause: seconds between two questions, if gcloud cannot tell.

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
