"""Sweeps on TPU slices: points are queued, resumed, and their results gathered."""

import base64
import functools
import io
import subprocess
import tarfile
import threading

import pytest

from bpd_jax.errors import UserError
from experiments.launch.detached import BUSY, FAILED, STOPPED
from experiments.launch.tpu_keep import Patience
from experiments.launch.tpu_slice import TpuSlice
from experiments.launch.tpu_state import Condition, Status
from experiments.sweeps.on_tpu import Fleet, fetch

POINTS = {f"heads={n}": ("train", str(n)) for n in range(5)}


def slices(count):
    return [TpuSlice(f"s-{n}", "zone", "v5e:4x4", "h:/r") for n in range(count)]


class Cloud:
    """Trains points; `broken` ones fail, `stopped` ones are stopped by somebody.

    `gone` slices are stopped for good. The first `cut` connections break.
    """

    def __init__(self, broken=(), gone=(), stopped=(), cut=0):
        self.broken, self.gone = broken, gone
        self.stopped, self.cut = stopped, cut
        self.trained = []
        self.fetched = []
        self.deleted = []
        self.coming = set()
        self.running = {}
        self.lock = threading.Lock()

    def run(self, command):
        name = command.words[5]
        text = str(command)
        with self.lock:
            if " start " in text:
                self.running[name] = text.rpartition("exec train ")[2][0]
            if " running" in text:
                return BUSY if name in self.running else 0
            if " delete " in text:
                self.deleted.append(name)
            if " follow" in text and self.cut:
                self.cut -= 1
                return 255
            if " follow" in text and name in self.running:
                number = self.running.pop(name)
                if number in self.broken:
                    return FAILED
                if number in self.stopped:
                    return STOPPED
                self.trained.append((name, number))
        return 0

    def status(self, tpu):
        stuck = tpu.name in self.gone
        condition = Condition.STUCK if stuck else Condition.READY
        if tpu.name in self.coming:
            condition = Condition.COMING
        return Status(condition, f"{tpu.name} is {condition.name}")

    def train(self, count, delete=False):
        tpus = slices(count)
        fleet = Fleet(
            tpus,
            {tpu.name: tpu.prepare("x.bundle") for tpu in tpus},
            self.run,
            self.status,
            lambda tpu: self.fetched.append(tpu.name),
            Patience(retries=0, requests=1, pause=0),
            delete,
        )
        fleet.wait_for_earlier_runs()
        return fleet.train(POINTS, "stamp")


@pytest.mark.parametrize("count", [1, 3, 8])
def test_every_point_is_trained_once(count):
    cloud = Cloud()
    assert cloud.train(count) == []
    assert sorted(number for _, number in cloud.trained) == list("01234")
    # Once for each slice at first, then after every point.
    assert len(cloud.fetched) == count + len(POINTS)


def test_a_point_that_fails_leaves_the_others(capsys):
    cloud = Cloud(broken="1")
    assert cloud.train(2) == ["heads=1"]
    assert sorted(number for _, number in cloud.trained) == list("0234")
    assert "error: heads=1: " in capsys.readouterr().out


def test_no_point_begins_after_one_was_stopped(capsys):
    cloud = Cloud(stopped="2")
    assert cloud.train(1) == ["heads=2", "heads=3", "heads=4"]
    assert [number for _, number in cloud.trained] == ["0", "1"]
    assert "s-0 was stopped" in capsys.readouterr().out


def test_a_slice_on_its_way_is_not_waited_for_after_the_end_was_asked_for():
    cloud = Cloud(stopped="01234")
    cloud.coming.add("s-1")
    assert cloud.train(2) == list(POINTS)
    assert cloud.trained == []


def test_an_earlier_run_that_is_stopped_ends_the_sweep():
    cloud = Cloud(stopped="9")
    cloud.running["s-0"] = "9"
    with pytest.raises(UserError, match="s-0 was stopped"):
        cloud.train(1)
    assert cloud.trained == []


def test_slices_are_given_back_but_where_a_run_may_be_at_work():
    cloud = Cloud(broken="1")
    assert cloud.train(2, delete=True) == ["heads=1"]
    assert sorted(cloud.deleted) == ["s-0", "s-1"]
    cloud = Cloud(cut=99)
    failed = cloud.train(2, delete=True)
    assert failed == list(POINTS)
    assert cloud.deleted == []


def test_an_earlier_run_is_waited_for_over_broken_connections():
    cloud = Cloud(cut=1)
    cloud.running["s-0"] = "9"
    assert cloud.train(1) == []
    assert [number for _, number in cloud.trained] == list("901234")


def test_points_of_a_slice_that_is_lost_go_to_another():
    cloud = Cloud(gone=["s-0"])
    assert cloud.train(2) == []
    assert {name for name, _ in cloud.trained} == {"s-1"}
    assert len(cloud.trained) == len(POINTS)


def test_points_are_left_over_without_slices(capsys):
    cloud = Cloud(gone=["s-0", "s-1"])
    assert cloud.train(2) == list(POINTS)
    assert cloud.trained == []
    assert "s-0 is STUCK and does not come back" in capsys.readouterr().out


def test_a_slice_that_is_lost_last_leaves_its_point_to_the_next_command():
    cloud = Cloud(gone=["s-0"])
    fleet = functools.partial(cloud.train, 1)
    assert fleet() == list(POINTS)
    cloud.gone = []
    assert fleet() == []


@pytest.fixture
def share(tmp_path, monkeypatch):
    """A worker's home folder with two runs on its share; asks it as gcloud would."""
    home = tmp_path / "home"
    for number in (3, 6):
        run = home / "share" / "sweep" / f"heads={number}"
        (run / "checkpoints" / "40" / "state").mkdir(parents=True)
        (run / "checkpoints" / "40" / "state" / "data").write_text("large")
        (run / "data").mkdir()
        (run / "config.gin").write_text(f"HEADS = {number}\n")
        (run / "metrics.jsonl").write_text('{"step": 40}\n')

    def ask(command):
        script = next(w[10:] for w in command.words if w.startswith("--command="))
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout.strip(), done.stderr.strip()

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here", ask


def test_results_are_fetched_without_the_checkpoints(share):
    here, ask = share
    fetch(slices(1)[0], here.relative_to(here) / "sweep", ask)
    found = sorted(str(path.relative_to(here)) for path in (here / "sweep").rglob("*"))
    assert found == sorted(
        f"sweep/heads={n}{rest}"
        for n in (3, 6)
        for rest in (
            "",
            "/checkpoints",
            "/checkpoints/40",
            "/config.gin",
            "/metrics.jsonl",
        )
    )
    text = (here / "sweep" / "heads=6" / "config.gin").read_text()
    assert text == "HEADS = 6\n"


def test_results_that_cannot_be_fetched_end_nothing(share, capsys):
    here, ask = share
    folder = here.relative_to(here) / "other"
    fetch(slices(1)[0], folder, ask)
    fetch(slices(1)[0], folder, lambda _: (0, "not base64", ""))
    fetch(slices(1)[0], folder, lambda _: (1, "", "ERROR: no connection"))
    assert capsys.readouterr().out.count("warning: could not fetch results") == 3


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.95])
def test_a_truncated_archive_replaces_nothing(share, capsys, part):
    here, ask = share
    folder = here.relative_to(here) / "sweep"
    fetch(slices(1)[0], folder, ask)
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    status, out, _ = ask(slices(1)[0].fetch(str(folder)))
    data = base64.b64decode(out)
    text = base64.b64encode(data[: int(part * len(data))]).decode()
    fetch(slices(1)[0], folder, lambda _: (status, text, ""))
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: could not fetch results")
    after = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert after == before


def test_an_archive_writes_nowhere_else(share, capsys):
    here, _ = share
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as members:
        member = tarfile.TarInfo("../../evil")
        member.size = 1
        members.addfile(member, io.BytesIO(b"x"))
    text = base64.b64encode(archive.getvalue()).decode()
    fetch(slices(1)[0], here.relative_to(here) / "sweep", lambda _: (0, text, ""))
    assert "warning: " in capsys.readouterr().out
    assert not (here.parent.parent / "evil").exists()
    assert not (here.parent / "evil").exists()
