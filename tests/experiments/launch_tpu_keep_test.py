"""Training on TPU slices that come and go."""

import pytest

from bpd_jax.errors import UserError
from experiments.launch.commands import train_words
from experiments.launch.tpu_keep import WINDOW, keep_training
from experiments.launch.tpu_slice import BUSY, TpuSlice

SLICE = TpuSlice("paper", "us-central2-b", "v4:4x4x4", "10.0.0.2:/runs", spot=True)


class Cloud:
    """Answers commands as told, and keeps what it was asked.

    A verb ends with the statuses that are given for it, one after another, then with 0.
    """

    def __init__(self, *states, hours=0.0, **statuses):
        self.states = list(states)
        self.statuses = {verb: list(each) for verb, each in statuses.items()}
        self.hours = hours  # that training takes
        self.asked = []
        self.now = 0.0

    def run(self, command):
        verb = command.words[4]
        verb = "train" if "bpd_jax.train" in str(command) else verb
        self.asked.append(verb)
        self.now += 3600 * self.hours * (verb == "train")
        return self.statuses[verb].pop(0) if self.statuses.get(verb) else 0

    def state(self):
        self.asked.append("state")
        return self.states.pop(0)

    def sleep(self, seconds):
        self.asked.append("sleep")
        self.now += seconds

    def keep(self, retries=1, requests=3):
        words = train_words("python", ["a.gin"], [], "w")
        keep_training(
            SLICE,
            [*SLICE.prepare("x.bundle"), SLICE.train(words)],
            self.run,
            self.state,
            retries=retries,
            requests=requests,
            pause=5,
            sleep=self.sleep,
            clock=lambda: self.now,
        )
        assert self.states == []
        return self.asked


ROUND = ["scp", "ssh", "train"]
AGAIN = ["delete", "state", "create", "state"]


def test_trains_on_a_new_slice_to_the_end():
    assert Cloud("", "READY").keep() == ["state", "create", "state", *ROUND]


def test_goes_on_with_a_slice_that_is_there():
    assert Cloud("READY").keep() == ["state", *ROUND]


def test_replaces_a_slice_that_was_taken_back_however_often():
    taken = ["PREEMPTED", "", "READY"]
    cloud = Cloud("READY", *taken, *taken, train=[1, 1])
    lost = ["sleep", "state", *AGAIN, *ROUND]
    assert cloud.keep(retries=0) == ["state", *ROUND, *lost, *lost]


def test_a_slice_that_was_taken_back_before_is_replaced_first():
    cloud = Cloud("TERMINATED", "", "READY")
    assert cloud.keep() == ["state", *AGAIN, *ROUND]


@pytest.mark.parametrize("state", ["CREATING", "RESTARTING", "REPAIRING", "STARTING"])
def test_a_slice_that_comes_back_is_waited_for(state):
    cloud = Cloud(state, state, "READY")
    assert cloud.keep() == ["state", *["sleep", "state"] * 2, *ROUND]


def test_asks_again_for_a_slice_while_there_is_none():
    cloud = Cloud("READY", "", "", "READY", train=[1], create=[1])
    asked = cloud.keep()
    assert asked[4:] == [
        *("sleep", "state", "create"),
        *("sleep", "state", "create", "state", *ROUND),
    ]


@pytest.mark.parametrize("verb, state", [("delete", "PREEMPTED"), ("create", "")])
def test_does_not_ask_for_a_slice_forever(verb, state):
    cloud = Cloud("READY", *[state] * 9, train=[1], **{verb: [1] * 9})
    with pytest.raises(UserError, match="no new slice paper in 3 requests"):
        cloud.keep(requests=3)
    assert cloud.asked.count(verb) == 3


def test_a_slice_that_is_taken_back_while_it_is_prepared_is_replaced():
    cloud = Cloud("READY", "PREEMPTED", "", "READY", ssh=[1])
    assert cloud.keep(retries=0) == [
        *("state", "scp", "ssh", "sleep", "state"),
        *AGAIN,
        *ROUND,
    ]


def test_prepares_again_after_a_pause():
    cloud = Cloud("READY", "READY", train=[255])
    assert cloud.keep() == ["state", *ROUND, "sleep", "state", *ROUND]


def test_gives_up_on_training_that_fails_by_itself():
    cloud = Cloud("READY", "READY", "READY", train=[1, 1])
    with pytest.raises(
        UserError, match=r"error 2 times, .* 1 \(train, on every worker"
    ):
        cloud.keep(retries=1)
    assert cloud.asked.count("train") == 2


def test_errors_of_long_ago_do_not_count():
    hours = WINDOW / 3600
    Cloud(*["READY"] * 9, train=[1] * 8, hours=hours).keep(retries=1)
    with pytest.raises(UserError, match="ended with an error 2 times"):
        Cloud(*["READY"] * 9, train=[1] * 8, hours=hours / 2).keep(retries=1)


def test_a_run_that_is_still_at_work_is_waited_for():
    Cloud(*["READY"] * 9, ssh=[BUSY] * 7, train=[BUSY]).keep(retries=0)


def test_says_what_it_could_not_do():
    with pytest.raises(UserError, match="could not ask for the slice: gcloud ended"):
        Cloud("", create=[1]).keep()
