"""Sweeps on TPU slices: points are queued and resumed, and their results fetched."""

import base64
import functools
import io
import subprocess
import tarfile
import threading

import pytest

from bpd_jax.base.errors import UserError
from experiments.launch.detached import BUSY, FAILED, STOPPED
from experiments.launch.tpu_keep import Patience
from experiments.launch.tpu_slice import TpuSlice
from experiments.launch.tpu_state import Condition, Status
from experiments.sweeps.on_tpu import Fleet, fetch

POINTS = {f"heads={n}": ("train", str(n)) for n in range(5)}


def slices(count):
    return [TpuSlice(f"s-{n}", "zone", "v5e:4x4", "h:/r") for n in range(count)]


class Cloud:
    """A fake gcloud that trains points: `broken` ones fail, `stopped` ones are stopped.

    `gone` slices are permanently stopped. The first `cut` connections break.
    """

    def __init__(self, broken=(), gone=(), stopped=(), cut=0):
        self.broken, self.gone = broken, gone
        self.stopped, self.cut = stopped, cut
        self.trained = []
        self.fetched = []
        self.deleted = []
        self.coming = set()
        self.running = {}
        self.silent = 0  # times that gcloud cannot report a state
        self.outages = 0  # the same, after each run
        self.lock = threading.Lock()

    def run(self, command):
        name = command.words[5]
        text = str(command)
        with self.lock:
            if " start " in text:
                # When one point is stopped, no other of the same launch starts.
                assert " stamp bash " in text
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
                self.silent = self.outages
                if number in self.broken:
                    return FAILED
                if number in self.stopped:
                    return STOPPED
                self.trained.append((name, number))
        return 0

    def status(self, tpu):
        if self.silent:
            self.silent -= 1
            raise UserError("gcloud cannot report the state of the request")
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
    # Results are fetched once per slice at first, then after every point.
    assert len(cloud.fetched) == count + len(POINTS)


def test_other_points_are_trained_after_a_failure(capsys):
    cloud = Cloud(broken="1")
    assert cloud.train(2) == ["heads=1"]
    assert sorted(number for _, number in cloud.trained) == list("0234")
    assert "error: heads=1: " in capsys.readouterr().out


def test_no_point_starts_after_a_stop(capsys):
    cloud = Cloud(stopped="2")
    assert cloud.train(1) == ["heads=2", "heads=3", "heads=4"]
    assert [number for _, number in cloud.trained] == ["0", "1"]
    assert "s-0 was stopped" in capsys.readouterr().out


def test_pending_slice_is_not_awaited_after_a_stop():
    cloud = Cloud(stopped="01234")
    cloud.coming.add("s-1")
    assert cloud.train(2) == list(POINTS)
    assert cloud.trained == []


def test_stopped_earlier_run_ends_the_sweep():
    cloud = Cloud(stopped="9")
    cloud.running["s-0"] = "9"
    with pytest.raises(UserError, match="s-0 was stopped"):
        cloud.train(1)
    assert cloud.trained == []


def test_slices_are_deleted_unless_a_run_may_continue():
    cloud = Cloud(broken="1")
    assert cloud.train(2, delete=True) == ["heads=1"]
    assert sorted(cloud.deleted) == ["s-0", "s-1"]
    cloud = Cloud(cut=99)
    failed = cloud.train(2, delete=True)
    assert failed == list(POINTS)
    assert cloud.deleted == []


def test_outages_end_no_sweep():
    cloud = Cloud()
    cloud.outages = 1
    cloud.running["s-0"] = "9"
    assert cloud.train(1, delete=True) == []
    assert [number for _, number in cloud.trained] == list("901234")
    assert cloud.deleted == ["s-0"]


def test_gcloud_that_cannot_answer_is_reported_at_once():
    cloud = Cloud()
    cloud.silent = 1
    with pytest.raises(UserError, match="gcloud cannot report"):
        cloud.train(1)


def test_earlier_run_is_awaited_over_broken_connections():
    cloud = Cloud(cut=1)
    cloud.running["s-0"] = "9"
    assert cloud.train(1) == []
    assert [number for _, number in cloud.trained] == list("901234")


def test_points_of_a_lost_slice_move_to_another():
    cloud = Cloud(gone=["s-0"])
    assert cloud.train(2) == []
    assert {name for name, _ in cloud.trained} == {"s-1"}
    assert len(cloud.trained) == len(POINTS)


def test_points_are_untrained_without_slices(capsys):
    cloud = Cloud(gone=["s-0", "s-1"])
    assert cloud.train(2) == list(POINTS)
    assert cloud.trained == []
    assert "s-0 is STUCK and does not recover" in capsys.readouterr().out


def test_points_left_after_the_last_slice_are_trained_by_the_next_command():
    cloud = Cloud(gone=["s-0"])
    train = functools.partial(cloud.train, 1)
    assert train() == list(POINTS)
    cloud.gone = []
    assert train() == []


@pytest.fixture
def share(tmp_path, monkeypatch):
    """A local folder, and a function that runs commands in a worker's home folder."""
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
        result = subprocess.run(
            ["bash", "-c", script],
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
        )
        return result.returncode, result.stdout.strip(), result.stderr.strip()

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here", ask


def test_results_are_fetched_without_the_checkpoints(share):
    local, ask = share
    fetch(slices(1)[0], local.relative_to(local) / "sweep", ask)
    fetched = sorted(
        str(path.relative_to(local)) for path in (local / "sweep").rglob("*")
    )
    assert fetched == sorted(
        f"sweep/heads={n}{suffix}"
        for n in (3, 6)
        for suffix in (
            "",
            "/checkpoints",
            "/checkpoints/40",
            "/config.gin",
            "/metrics.jsonl",
        )
    )
    text = (local / "sweep" / "heads=6" / "config.gin").read_text()
    assert text == "HEADS = 6\n"


def test_failed_fetches_are_warnings(share, capsys):
    local, ask = share
    folder = local.relative_to(local) / "other"
    fetch(slices(1)[0], folder, ask)
    fetch(slices(1)[0], folder, lambda _: (0, "not base64", ""))
    fetch(slices(1)[0], folder, lambda _: (1, "", "ERROR: no connection"))
    assert capsys.readouterr().out.count("warning: could not fetch results") == 3


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.6, 0.95])
def test_a_truncated_archive_replaces_nothing(share, capsys, fraction):
    local, ask = share
    folder = local.relative_to(local) / "sweep"
    fetch(slices(1)[0], folder, ask)
    before = {path: path.read_bytes() for path in local.rglob("*") if path.is_file()}
    status, out, _ = ask(slices(1)[0].fetch(str(folder)))
    data = base64.b64decode(out)
    text = base64.b64encode(data[: int(fraction * len(data))]).decode()
    fetch(slices(1)[0], folder, lambda _: (status, text, ""))
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: could not fetch results")
    after = {path: path.read_bytes() for path in local.rglob("*") if path.is_file()}
    assert after == before


def test_archive_members_outside_the_folder_are_refused(share, capsys):
    local, _ = share
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as members:
        member = tarfile.TarInfo("../../evil")
        member.size = 1
        members.addfile(member, io.BytesIO(b"x"))
    text = base64.b64encode(archive.getvalue()).decode()
    fetch(slices(1)[0], local.relative_to(local) / "sweep", lambda _: (0, text, ""))
    assert "warning: " in capsys.readouterr().out
    assert not (local.parent.parent / "evil").exists()
    assert not (local.parent / "evil").exists()
