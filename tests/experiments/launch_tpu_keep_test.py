"""Training on TPU slices that are preempted, over connections that break."""

import pytest

from bpd_jax.base.errors import UserError
from experiments.launch.commands import train_words
from experiments.launch.detached import BUSY, FAILED, STOPPED, UNKNOWN
from experiments.launch.tpu_keep import WINDOW, Keeper, Patience, RunEndedError
from experiments.launch.tpu_slice import TpuSlice
from experiments.launch.tpu_state import Condition, Status, read_status

SLICE = TpuSlice("paper", "us-central2-b", "v4:4x4x4", "10.0.0.2:/runs", spot=True)
ABSENT, READY, COMING, LOST, REFUSED, STUCK = (
    Condition.ABSENT,
    Condition.READY,
    Condition.COMING,
    Condition.LOST,
    Condition.REFUSED,
    Condition.STUCK,
)


class Cloud:
    """A fake gcloud: replays answers and records the verbs of commands.

    A verb exits with the statuses given for it, one after another, then with 0. Where
    a condition is None, gcloud cannot report it.
    """

    def __init__(self, *conditions, hours=0.0, **statuses):
        self.conditions = list(conditions)
        self.statuses = {verb: list(codes) for verb, codes in statuses.items()}
        self.hours = hours  # that a run takes
        self.asked = []
        self.commands = []
        self.now = 0.0

    def run(self, command):
        verb = command.words[4]
        if verb == "ssh":
            verb = next(
                (
                    word
                    for word in ("start", "follow", "report", "running")
                    if f"bpd_jax_run {word}" in str(command)
                ),
                "setup",
            )
        self.asked.append(verb)
        self.commands.append(command)
        self.now += 3600 * self.hours * (verb == "follow")
        return self.statuses[verb].pop(0) if self.statuses.get(verb) else 0

    def status(self):
        condition = self.conditions.pop(0)
        if condition is None:
            raise UserError("gcloud cannot report the state of the request")
        return Status(condition, f"paper is {condition.name}")

    def sleep(self, seconds):
        self.asked.append("sleep")
        self.now += seconds

    def keeper(self, retries=1, requests=3, delete=False):
        return Keeper(
            SLICE,
            self.run,
            self.status,
            Patience(retries, requests, 5),
            delete,
            sleep=self.sleep,
            clock=lambda: self.now,
        )

    def train(self, retries=1, requests=3, delete=False):
        keeper = self.keeper(retries, requests, delete)
        words = train_words("python", ["a.gin"], [], "w")
        keeper.train(SLICE.prepare("x.bundle"), words, "name")
        assert self.conditions == []
        return self.asked


ROUND = ["scp", "setup", "start", "follow"]


def test_creates_slices_and_trains():
    assert Cloud(ABSENT, READY, READY).train() == ["create", *ROUND]


def test_preempted_slices_are_always_replaced():
    preempted = [LOST, LOST, ABSENT, READY]
    cloud = Cloud(READY, READY, *preempted, *preempted, follow=[FAILED, FAILED])
    restart = ["sleep", "delete", "create", *ROUND]
    assert cloud.train(retries=0) == [*ROUND, *restart, *restart]


def test_slow_deletion_is_not_repeated_immediately():
    cloud = Cloud(READY, READY, *[LOST] * 4, ABSENT, READY, follow=[FAILED])
    waits = ["sleep", "delete", "sleep", "delete", "create"]
    assert cloud.train(retries=0) == [*ROUND, *waits, *ROUND]


def test_pending_slices_are_awaited():
    verbs = Cloud(COMING, COMING, COMING, READY).train(requests=1)
    assert verbs == ["sleep", "sleep", *ROUND]


def test_stuck_slices_end_the_launcher():
    with pytest.raises(UserError, match="STUCK and does not recover") as error:
        Cloud(READY, READY, LOST, STUCK, follow=[FAILED]).train()
    assert "queued-resources delete paper" in str(error.value)


def test_number_of_requests_is_limited():
    cloud = Cloud(READY, *[ABSENT] * 9, create=[1] * 9)
    with pytest.raises(UserError, match="3 requests for paper were rejected"):
        cloud.train(requests=3)
    assert cloud.asked.count("create") == 3
    # A request that fails later is withdrawn, and counts too.
    cloud = Cloud(READY, *[REFUSED, ABSENT] * 9)
    with pytest.raises(UserError, match="3 requests for paper were rejected"):
        cloud.train(requests=3)
    assert cloud.asked == [*["delete", "sleep", "create"] * 2, "delete"]


def test_failure_of_the_first_request_is_reported():
    with pytest.raises(UserError, match="could not request the slice: gcloud ended"):
        Cloud(ABSENT, create=[1]).train()
    with pytest.raises(UserError, match=r"paper is REFUSED: gcloud .* describe"):
        Cloud(ABSENT, REFUSED).train()


def test_run_continues_over_broken_connections():
    """The run continues; it is not started again, and no error counts."""
    cloud = Cloud(READY, READY, *[READY] * 5, follow=[255, 255, 1, 255, 255])
    assert cloud.train(retries=0, requests=5) == [*ROUND, *["sleep", "follow"] * 5]


def test_unreachable_host_ends_the_launcher():
    with pytest.raises(UserError, match="could not be reached 3 times"):
        Cloud(*[READY] * 9, follow=[255] * 9).train(requests=2)


def test_connection_lost_with_the_slice_replaces_the_slice():
    cloud = Cloud(READY, READY, LOST, LOST, LOST, ABSENT, READY, follow=[255])
    verbs = cloud.train(retries=0)
    assert verbs == [*ROUND, "sleep", "sleep", "delete", "create", *ROUND]


@pytest.mark.parametrize("status", [FAILED, UNKNOWN])
def test_failed_run_is_reported_and_restarted(status):
    cloud = Cloud(*[READY] * 4, follow=[status])
    assert cloud.train() == [*ROUND, "sleep", "report", *ROUND]


def test_number_of_failed_attempts_is_limited():
    cloud = Cloud(*[READY] * 9, follow=[FAILED, FAILED])
    with pytest.raises(UserError, match="2 attempts failed, the last with status 76"):
        cloud.train(retries=1)
    assert cloud.asked.count("start") == 2


@pytest.mark.parametrize("verb", ["scp", "setup", "start"])
def test_failed_preparation_is_repeated_after_a_pause(verb):
    cloud = Cloud(*[READY] * 4, **{verb: [255]})
    attempted = ROUND[: ROUND.index(verb) + 1]
    assert cloud.train() == [*attempted, "sleep", *ROUND]


def test_failures_before_the_window_do_not_count():
    hours = WINDOW / 3600
    conditions = [READY] * 18
    Cloud(*conditions, follow=[FAILED] * 8, hours=hours).train(retries=1)
    with pytest.raises(UserError, match="2 attempts failed"):
        Cloud(*conditions, follow=[FAILED] * 8, hours=hours / 2).train(retries=1)


def test_run_of_an_earlier_launcher_is_followed():
    cloud = Cloud(*[READY] * 3, setup=[BUSY])
    verbs = cloud.train(retries=0)
    assert verbs == ["scp", "setup", "follow", "sleep", *ROUND]
    cloud = Cloud(*[READY] * 3, start=[BUSY])
    assert cloud.train(retries=0) == [*ROUND, "sleep", *ROUND]
    # Over broken connections, and replacing slices that are lost meanwhile.
    cloud = Cloud(*[READY] * 4, setup=[BUSY], follow=[255])
    verbs = cloud.train(retries=0)
    assert verbs == ["scp", "setup", "follow", "sleep", "follow", "sleep", *ROUND]
    conditions = [READY, READY, LOST, LOST, ABSENT, READY]
    verbs = Cloud(*conditions, setup=[BUSY], follow=[255]).train(retries=0)
    replaced = ["sleep", "sleep", "delete", "create"]
    assert verbs == ["scp", "setup", "follow", *replaced, *ROUND]


@pytest.mark.parametrize("told", [FAILED, UNKNOWN, 0])
def test_run_that_hangs_on_another_worker_ends_the_launcher(told):
    """The first worker tells of an earlier run, each time at once."""
    cloud = Cloud(*[READY] * 9, setup=[BUSY] * 9, follow=[told] * 9)
    with pytest.raises(UserError, match=r"2 attempts failed.*--stop ends it") as error:
        cloud.train(retries=1, delete=True)
    # The run may be one that continues.
    assert not isinstance(error.value, RunEndedError)
    assert "delete" not in cloud.asked
    # The workers print their names.
    assert cloud.asked[-1] == "running"
    assert cloud.asked.count("setup") == (3 if told == 0 else 2)
    assert "--worker=all" in cloud.commands[-1].words


@pytest.mark.parametrize("setup", [[], [BUSY]], ids=["started here", "joined"])
def test_stopped_run_is_not_restarted(setup):
    cloud = Cloud(READY, READY, setup=setup, follow=[STOPPED])
    with pytest.raises(UserError, match="was stopped; the same command resumes"):
        cloud.train()
    assert cloud.asked.count("start") == (0 if setup else 1)


def test_run_stopped_between_two_attempts_is_not_restarted():
    cloud = Cloud(*[READY] * 4, follow=[FAILED], start=[0, STOPPED])
    with pytest.raises(RunEndedError, match="was stopped; the same command resumes"):
        cloud.train(delete=True)
    start = ["scp", "setup", "start"]
    assert cloud.asked == [*ROUND, "sleep", "report", *start, "delete"]


def test_all_attempts_of_a_launcher_are_started_under_its_name():
    cloud = Cloud(*[READY] * 4, follow=[FAILED])
    cloud.keeper().train([], ("train",), "20261123-4", "20261123")
    starts = [str(c) for c in cloud.commands if "bpd_jax_run start" in str(c)]
    assert "start 20261123-4-1 20261123 bash" in starts[0]
    assert "start 20261123-4-2 20261123 bash" in starts[1]


def test_long_outage_is_waited_for():
    """Neither gcloud nor a worker can be reached, and then the slice is gone."""
    outage = [None] * 50
    conditions = [READY, READY, *outage, LOST, *outage, LOST, *outage, LOST]
    conditions += [*outage, ABSENT, *outage, READY]
    verbs = Cloud(*conditions, follow=[255]).train(retries=0, requests=50)
    waits = ["sleep"] * 50
    replaced = [*waits, "sleep", *waits, *waits, "delete", *waits, "create", *waits]
    assert verbs == [*ROUND, "sleep", *replaced, *ROUND]


def test_waiting_for_an_outage_is_limited():
    def asked(*conditions, **statuses):
        cloud = Cloud(*conditions, *[None] * 9, **statuses)
        with pytest.raises(UserError, match="gcloud cannot report") as error:
            cloud.train(requests=3, delete=True)
        assert not isinstance(error.value, RunEndedError)
        assert "delete" not in cloud.asked
        return cloud.asked

    waits = ["sleep"] * 3
    assert asked() == waits
    assert asked(READY) == waits
    assert asked(READY, READY, follow=[255]) == [*ROUND, "sleep", *waits]
    assert asked(READY, READY, follow=[FAILED]) == [*ROUND, "sleep", *waits]


class Api:
    """Replays the answers of gcloud to `describe`."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def ask(self, command):
        assert "describe" in command.words
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return answer, "", "ERROR: the network is unreachable"
        if answer == "":
            return 1, "", "ERROR: NOT_FOUND: Resource 'paper' was not found"
        return 0, answer, ""

    def read(self, tpu):
        status = read_status(tpu, self.ask, sleep=lambda _: None)
        assert self.answers == []
        return status.condition


@pytest.mark.parametrize(
    "answers, condition",
    [
        ([""], ABSENT),
        (["CREATING"], COMING),
        (["ACCEPTED"], COMING),
        (["WAITING_FOR_RESOURCES"], COMING),
        (["PROVISIONING"], COMING),
        (["SUSPENDING"], COMING),
        (["DELETING"], COMING),
        (["FAILED"], REFUSED),
        (["SUSPENDED"], LOST),
        (["A_NEW_STATE"], STUCK),
        (["ACTIVE", "READY"], READY),
        (["ACTIVE", "REPAIRING"], COMING),
        (["ACTIVE", "RESTARTING"], COMING),
        (["ACTIVE", "PREEMPTED"], LOST),
        (["ACTIVE", "TERMINATED"], LOST),
        (["ACTIVE", ""], LOST),
        (["ACTIVE", "STOPPED"], STUCK),
        (["ACTIVE", "STOPPING"], STUCK),
        (["ACTIVE", "SUSPENDED"], STUCK),
        (["ACTIVE", "HIDDEN"], STUCK),
        ([1, 1, "ACTIVE", 1, "READY"], READY),
    ],
)
def test_conditions_of_gcloud_states(answers, condition):
    assert Api(*answers).read(SLICE) is condition


def test_suspended_request_that_is_not_spot_is_stuck():
    tpu = TpuSlice("paper", "zone", "v4:4x4x4", "h:/r", reserved=True)
    assert Api("SUSPENDED").read(tpu) is STUCK


def test_worst_condition_of_several_slices_counts():
    tpu = TpuSlice("paper", "zone", "v5e:4x4", "h:/r", slices=3)
    assert Api("ACTIVE", "READY", "READY", "READY").read(tpu) is READY
    assert Api("ACTIVE", "REPAIRING", "READY", "READY").read(tpu) is COMING
    assert Api("ACTIVE", "REPAIRING", "PREEMPTED", "READY").read(tpu) is LOST
    assert Api("ACTIVE", "PREEMPTED", "STOPPED", "CREATING").read(tpu) is STUCK


def test_unanswered_describe_is_an_error():
    with pytest.raises(UserError, match="cannot report the state of the request"):
        Api(*[1] * 5).read(SLICE)


def test_slices_are_deleted_after_a_run_has_ended():
    assert Cloud(READY, READY).train(delete=True) == [*ROUND, "delete"]
    for status, conditions in ((FAILED, [READY] * 3), (STOPPED, [READY] * 2)):
        cloud = Cloud(*conditions, follow=[status])
        with pytest.raises(RunEndedError):
            cloud.train(retries=0, delete=True)
        assert cloud.asked[-1] == "delete"
        assert cloud.asked.count("delete") == 1


def test_slices_are_kept_while_a_run_may_continue():
    cloud = Cloud(READY, READY, follow=[255])
    with pytest.raises(UserError, match="could not be reached"):
        cloud.train(requests=0, delete=True)
    assert "delete" not in cloud.asked
    # The connection broke, so that an earlier run or this one may continue.
    for verb in ("scp", "setup", "start"):
        cloud = Cloud(*[READY] * 3, **{verb: [255]})
        with pytest.raises(UserError, match="attempts failed") as error:
            cloud.train(retries=0, delete=True)
        assert not isinstance(error.value, RunEndedError)
        assert "delete" not in cloud.asked


def test_failed_deletion_is_repeated_and_reported():
    cloud = Cloud(READY, READY, delete=[1])
    assert cloud.train(delete=True) == [*ROUND, "delete", "sleep", "delete"]
    cloud = Cloud(READY, READY, delete=[1] * 9)
    with pytest.raises(UserError, match=r"still billed.*queued-resources delete"):
        cloud.train(delete=True)


def test_wait_follows_only_a_run_in_progress():
    def wait(*conditions, **statuses):
        cloud = Cloud(*conditions, **statuses)
        cloud.keeper(requests=2).wait()
        return cloud.asked

    assert wait(LOST) == []
    assert wait(READY) == ["running"]
    assert wait(READY, running=[BUSY], follow=[FAILED]) == ["running", "follow"]
    # After a broken connection, the state is asked for again unless the slice is lost.
    verbs = wait(READY, READY, running=[255, BUSY])
    assert verbs == ["running", "sleep", "running", "follow"]
    assert wait(READY, LOST, running=[255]) == ["running", "sleep"]
    with pytest.raises(UserError, match="was stopped"):
        wait(READY, running=[BUSY], follow=[STOPPED])


def test_pending_request_is_not_awaited_after_a_stop():
    cloud = Cloud(COMING, COMING, COMING)
    keeper = cloud.keeper()
    keeper.stopped = lambda: "sleep" in cloud.asked
    with pytest.raises(UserError, match="was stopped"):
        keeper.train([], ("train",), "name")
    assert cloud.asked == ["sleep"]
