"""Sweeps: their points, unfinished points, and tables."""

import json
import pathlib

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.storage.buckets import as_path
from bpd_jax.storage.files import read_json
from experiments.sweeps.catalog import SWEEPS, Grid, find_points, find_sweep
from experiments.sweeps.points import make_point
from tests.commands import start
from tests.json_lines import write_json_lines

ROOT = pathlib.Path(__file__).parent.parent.parent
SIZES = [(name, size) for name, sweep in SWEEPS.items() for size in sweep.grids]
SLURM = ["--launcher=slurm", "--gin_file=gin_configs/meshes/gpu_8.gin"]
TPU = [
    "--launcher=tpu",
    "--requested=2",
    "--name=sweep",
    "--zone=us-east5-b",
    "--topology=v6e:16x16",
    "--share=10.0.0.2:/runs",
    "--gin_file=gin_configs/meshes/v6e_256.gin",
]
TINY = ["--gin_file=experiments/sweeps/tiny.gin", "--gin.STEPS=40"]


def test_a_grid_is_the_product_of_its_axes():
    grid = Grid(("base",), {"a": {"1": ("x",), "2": ()}, "b": {"3": ("y", "z")}})
    assert grid.points() == {
        "a=1,b=3": ("base", "x", "y", "z"),
        "a=2,b=3": ("base", "y", "z"),
    }


@pytest.mark.parametrize("name, size", SIZES)
def test_every_point_builds_its_run(name, size, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    bindings = ["START = 'base'"] if name == "finetune" else []
    points = [
        make_point(point, arguments, tmp_path / point, more_bindings=bindings)
        for point, arguments in find_points(name, size).items()
    ]
    assert len(points) > 1
    configs = [point.parsed.value for point in points]
    assert all(
        first != second
        for first in configs
        for second in configs
        if first is not second
    )
    columns = find_sweep(name).columns
    for config in configs:
        # Every run of a sweep has the columns of its table.
        heads = [int(c.rpartition("_")[2]) for c in columns if "_head_" in c]
        assert max(heads, default=1) <= config.model.block_size


def test_dry_run_of_every_sweep():
    bindings = ["--gin.START='base'"]
    results = start(
        "experiments.sweeps.run",
        *(
            [f"--sweep={name}", f"--size={size}", "--dry_run"]
            + (bindings if name == "finetune" else [])
            for name, size in SIZES
        ),
        ["--sweep=heads", *SLURM, "--gpus=8", "--dry_run"],
        ["--sweep=heads", *TPU, "--dry_run"],
        ["--sweep=heads", *TPU, "--stop", "--dry_run"],
        ["--sweep=heads", "--size=tiny", "--stop", "--dry_run"],
        ["--sweep=heads", *SLURM, "--gpus=7", "--dry_run"],
        ["--sweep=heads", *SLURM, "--gpus=8", "--dry_run", "--point=heads=6"],
        ["--sweep=heads", "--point=heads=7", "--dry_run"],
        ["--sweep=head", "--dry_run"],
        ["--sweep=heads", "--size=huge", "--dry_run"],
    )
    for (name, size), result in zip(SIZES, results, strict=False):
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        assert len(lines) == len(find_points(name, size)) + 1
        assert all(line.startswith("python -m bpd_jax.train ") for line in lines[:-1])
        assert lines[-1].startswith("# 0 of ")
    array, tpu, stop, local, seven_gpus, single, *invalid = results[len(SIZES) :]
    invalid = [local, seven_gpus, *invalid]
    assert tpu.returncode == 0, tpu.stderr
    assert tpu.stdout.count(" queued-resources create sweep-") == 2
    assert tpu.stdout.count("--workdir=../share/runs/sweeps/heads_paper/heads=") == 3
    assert stop.returncode == 0, stop.stderr
    assert stop.stdout.count("bpd_jax_run stop") == 2
    assert "create" not in stop.stdout
    assert "--array" not in single.stdout
    assert "HEADS = 6" in single.stdout
    assert "#SBATCH --array=0-2\n" in array.stdout
    assert array.stdout.count("bpd_jax.train") == 3
    for result, message in zip(
        invalid,
        [
            "--stop needs --launcher=tpu",
            "but there are 7 devices",
            "the sweep has no point heads=7; there are heads=3; heads=6; heads=9",
            "there is no sweep 'head'; there are heads: separate models",
            "has no --size=huge: give paper, tiny",
        ],
        strict=True,
    ):
        assert result.returncode == 1
        assert message in result.stderr


@pytest.fixture
def point(tmp_path, monkeypatch):
    """A point whose run can be written by hand."""
    monkeypatch.chdir(ROOT)
    point = make_point(
        "a=1",
        [*TINY, "--gin.TrainConfig.patience=2"],
        tmp_path / "run",
        more_bindings=["TrainConfig.select_by = 'validation_accuracy_head_1'"],
    )

    def write(rows, saved=None, text=None):
        text = point.parsed.text if text is None else text
        last = rows[-1][0] if saved is None else saved
        (point.folder / "checkpoints" / str(last)).mkdir(parents=True, exist_ok=True)
        (point.folder / "config.gin").write_text(text)
        lines = [
            {"step": step, "validation_accuracy_head_1": value, "validation_loss": 1.0}
            for step, value in rows
        ]
        write_json_lines(point.folder / "metrics.jsonl", [{"step": 1}, *lines])

    return point, write


def test_finished_points_have_their_last_checkpoint(point):
    point, write = point
    assert not point.is_finished()
    assert point.best() is None
    write([(20, 0.5)])
    assert not point.is_finished()
    write([(20, 0.5), (40, 0.4)], saved=20)  # killed before its last checkpoint
    assert not point.is_finished()
    write([(20, 0.5), (40, 0.4)])
    assert point.is_finished()
    assert point.best()["step"] == 20  # an accuracy is better when it is higher


def test_evaluations_that_are_not_finite_count_as_evaluations(point):
    point, write = point
    write([(20, 0.5), (40, float("nan"))])
    assert point.is_finished()
    assert point.best()["step"] == 20
    write([(40, float("nan"))])
    assert point.is_finished()
    assert point.best() is None


def test_table_of_runs_with_values_that_are_not_finite(tmp_path):
    nan = float("nan")
    rows = [
        [{"step": 2, "validation_loss": 1.5, "validation_loss_head_1": nan}],
        [{"step": 2, "validation_loss": nan}],
    ]
    for name, content in zip(NAMES, rows, strict=True):
        folder = tmp_path / "rescorers_tiny" / name
        write_json_lines(folder / "metrics.jsonl", content)
    command = ["--sweep=rescorers", "--size=tiny", f"--output={tmp_path}", "--table"]
    command += [f"--point={name}" for name in NAMES]
    [result] = start("experiments.sweeps.run", command)
    assert result.returncode == 0, result.stderr
    assert "1.5000" in result.stdout
    assert "validation_loss is not finite" in result.stdout
    # Strict JSON.
    saved = read_json(tmp_path / "rescorers_tiny" / "results.json")
    best = {"step": 2, "validation_loss": 1.5}
    assert saved == {NAMES[0]: {"finished": False, "best": best}}


def test_incomplete_checkpoint_in_a_bucket_does_not_count(storage, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = as_path("gs://bpd-test/sweep_points/run")
    bindings = ["TrainConfig.select_by = 'validation_loss'"]
    point = make_point("a=1", TINY, folder, more_bindings=bindings)
    row = json.dumps({"step": 40, "validation_loss": 1.0}).encode()
    for name, data in (
        ("config.gin", point.parsed.text.encode()),
        ("metrics.jsonl", row + b"\n"),
        ("checkpoints/40/params/part", b"x"),
    ):
        storage.put("bpd-test", f"sweep_points/run/{name}", data)
    assert not point.is_finished()
    name = "sweep_points/run/checkpoints/40/commit_success.txt"
    storage.put("bpd-test", name, b"")
    assert point.is_finished()


def test_a_run_that_ended_early_is_finished(point):
    point, write = point
    write([(10, 0.5), (20, 0.4), (30, 0.5)])
    assert point.is_finished()


def test_damaged_run_is_reported_in_one_sentence(point):
    point, write = point
    write([(20, 0.5), (40, 0.4)])
    (point.folder / "config.gin").write_bytes(b"HEADS = \xff")
    with pytest.raises(UserError, match="UTF-8"):
        point.is_finished()
    write([(20, 0.5), (40, 0.4)])
    (point.folder / "metrics.jsonl").unlink()
    (point.folder / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl: Is a directory"):
        point.best()


def test_another_run_in_the_folder_is_refused(point):
    point, write = point
    write([(40, 0.5)], text="STEPS = 7")
    with pytest.raises(UserError, match="contains a run with other settings"):
        point.is_finished()


def test_a_sweep_in_a_bucket_needs_no_share(storage):
    flags = [flag for flag in TPU if not flag.startswith("--share")]
    flags += ["--sweep=heads", "--output=gs://bpd-test/sweeps"]
    planned, table, refused = start(
        "experiments.sweeps.run",
        [*flags, "--dry_run"],
        [*flags, "--table"],
        ["--sweep=heads", *flags[:-1], "--dry_run"],
    )
    assert planned.returncode == 0, planned.stderr
    folders = "--workdir=gs://bpd-test/sweeps/heads_paper/heads="
    assert planned.stdout.count(folders) == 3
    assert "share" not in planned.stdout
    assert "# 0 of 3 points are finished" in planned.stdout
    assert table.returncode == 0, table.stderr
    assert table.stdout.count("not measured yet") == 3
    assert "gs://bpd-test/sweeps/heads_paper/results.json" in table.stdout
    assert "--share is missing" in refused.stderr


NAMES = ["layers=1,width=64", "layers=1,width=128"]


@pytest.mark.exhaustive
def test_sweep_trains_resumes_and_makes_a_table(tmp_path):
    pytest.importorskip("seqio")
    (tmp_path / "texts").mkdir()
    for number in range(12):
        lines = [f"{number} times {k} is {number * k}." for k in range(20)]
        (tmp_path / "texts" / f"{number}.txt").write_text("\n".join(lines))
    command = [
        "--sweep=rescorers",
        "--size=tiny",
        *(f"--point={name}" for name in NAMES),
        f"--output={tmp_path / 'sweeps'}",
        "--gin.TextTask.corpus='text_files'",
        f"--gin.TextTask.text_files='{tmp_path}/texts/*.txt'",
        "--gin.TextTask.vocabulary='bpe:270'",
        "--gin.TextTask.validation_fraction=0.25",
        "--gin.STEPS=2",
        "--gin.LENGTH=32",
        "--gin.WARMUP_STEPS=0",
    ]
    first, repeated = start("experiments.sweeps.run", command, [*command, "--dry_run"])
    assert first.returncode == 0, first.stderr
    assert repeated.stdout == "# 2 of 2 points are finished\n"
    path = tmp_path / "sweeps" / "rescorers_tiny" / "results.json"
    results = json.loads(path.read_text())
    assert list(results) == NAMES
    for name, result in results.items():
        assert result["finished"]
        assert f"{result['best']['validation_loss']:.4f}" in first.stdout
        assert name in first.stdout
