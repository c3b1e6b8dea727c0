"""Sweeps: their points, points that have ended, and tables."""

import json
import pathlib
import re

import pytest

from bpd_jax.base import configuration
from bpd_jax.storage.files import read_json
from bpd_jax.training.config import TrainConfig
from experiments.launch.command import TRAIN, parse_program
from experiments.sweeps.catalog import SWEEPS
from tests.commands import assert_all_refused, succeed, succeed_all
from tests.json_lines import write_json_lines

ROOT = pathlib.Path(__file__).parent.parent.parent
SIZES = [(name, size) for name, sweep in SWEEPS.items() for size in sweep.grids]
TPU = [
    *("--launcher=tpu", "--requested=2", "--name=sweep", "--zone=us-east5-b"),
    *("--topology=v6e:16x16", "--output=gs://bpd-test/sweeps", "--dry_run"),
]
RESCORERS = ["--sweep=rescorers", "--size=tiny"]
NAMES = ["layers=1,width=64", "layers=1,width=128"]


@pytest.mark.parametrize("name, size", SIZES)
def test_every_point_builds_its_run(name, size, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep, given = SWEEPS[name], ["--gin.START='base'"] * (name == "finetune")
    points = sweep.points(size).values()
    programs = [parse_program([*words, *given]) for words in points]
    assert len(set(programs)) == len(points) > 1
    for program in programs:
        if program.module != TRAIN:
            study = ROOT / "experiments" / program.arguments[1]
            assert (study / f"{size}.gin").exists()
            continue
        settings = program.values("gin_file"), program.values("gin_bindings")
        config = configuration.parse(*settings, TrainConfig).value
        # Every training has the columns of its table.
        heads = [int(c.rpartition("_")[2]) for c in sweep.columns if "_head_" in c]
        assert max(heads, default=1) <= config.model.block_size


def test_the_docs_list_every_sweep():
    page = (ROOT / "docs" / "training.md").read_text()
    section = page.partition("## 8. Sweeps")[2]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\w, ]+) \|$", section, re.MULTILINE)
    assert rows == [(name, ", ".join(sweep.grids)) for name, sweep in SWEEPS.items()]


def test_dry_runs(storage):
    mesh = ["--", "--gin_file=gin_configs/meshes/gpu_8.gin"]
    slurm = ["--sweep=heads", "--launcher=slurm", "--dry_run"]
    local, studies, array, tpu, stop = succeed_all(
        "experiments.sweeps.run",
        ["--sweep=heads", "--dry_run", "--point=heads=6", "--", "--gin.STEPS=5"],
        ["--sweep=studies", "--dry_run", "--", "--data=FOLDER"],
        [*slurm, *mesh],
        ["--sweep=heads", *TPU, "--", "--gin_file=gin_configs/meshes/v6e_256.gin"],
        ["--sweep=heads", *TPU, "--stop"],
    )
    assert local.stdout.splitlines() == [
        "python -m bpd_jax.train --gin_file=gin_configs/runs/pretrain.gin "
        "'--gin_bindings=HEADS = 6' '--gin_bindings=STEPS = 5' "
        "--workdir=runs/sweeps/heads_paper/heads=6",
        "# 0 of 1 points have ended",
    ]
    folder = "--workdir=runs/sweeps/studies_paper/study=table4"
    assert f"table4 --data=FOLDER {folder}\n" in studies.stdout
    assert "#SBATCH --array=0-2\n" in array.stdout
    assert array.stdout.count("bpd_jax.train") == 3
    assert tpu.stdout.count(" queued-resources create sweep-") == 2
    assert tpu.stdout.count("--workdir=gs://bpd-test/sweeps/heads_paper/heads=") == 3
    assert stop.stdout.count("worker.sh stop") == 2
    cases = [
        ([*slurm, "--gpus=7", *mesh], "but there are 7 devices"),
        (["--sweep=heads", "--point=heads=7"], "there is no point heads=7 among head"),
        (["--sweep=head"], "there is no sweep 'head'; there are heads: separate model"),
        (["--sweep=heads", "--size=huge"], "has no --size=huge: give paper, tiny"),
    ]
    cases = [([*words, "--dry_run"], message) for words, message in cases]
    assert_all_refused("experiments.sweeps.run", cases)


def test_table_shows_whatever_is_there(tmp_path):
    nan, folder = float("nan"), tmp_path / "rescorers_tiny"
    rows = [
        {"step": 2, "validation_loss": 2.5, "validation_loss_head_1": nan},
        {"step": 4, "validation_loss": 1.5, "validation_loss_head_1": nan},
        {"step": 6, "validation_loss": nan},
    ]
    write_json_lines(folder / NAMES[0] / "metrics.jsonl", rows)
    methods = [
        {"label": "BPD", "block_efficiency": 1.25, "upper_bound": False},
        {"label": "oracle", "block_efficiency": 3.0, "upper_bound": True},
    ]
    (folder / NAMES[0] / "evaluation").mkdir()
    report = folder / NAMES[0] / "evaluation" / "report.json"
    report.write_text(json.dumps({"methods": methods}))
    output = f"--output={tmp_path}"
    study = tmp_path / "studies_tiny" / "study=table4" / "table4"
    write_json_lines(study / "records.jsonl", [{}, {}])
    table, studies, _ = succeed_all(
        "experiments.sweeps.run",
        [*RESCORERS, output, "--table"],
        ["--sweep=studies", "--size=tiny", output, "--table"],
        ["--sweep=heads", output, "--table"],
    )
    assert all(text in table.stdout for text in ("1.5000", "1.2500", "BPD", NAMES[1]))
    first = {"step": 4, "validation_loss": 1.5, "block efficiency": 1.25, "by": "BPD"}
    found = read_json(folder / "results.json")
    assert (found[NAMES[0]], found[NAMES[1]]) == (first, {})
    assert f"python -m bpd_jax.report {tmp_path}/studies_tiny\n" in studies.stdout
    report.write_text("{")
    cases = [([*RESCORERS, output, "--table"], "report.json")]
    assert_all_refused("experiments.sweeps.run", cases)


@pytest.mark.exhaustive
def test_sweep_trains_resumes_and_makes_a_table(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(12):
        lines = [f"{number} times {k} is {number * k}." for k in range(20)]
        (tmp_path / "texts" / f"{number}.txt").write_text("\n".join(lines))
    flags = [*RESCORERS, *(f"--point={x}" for x in NAMES), f"--output={tmp_path}"]
    more = [
        "--",
        "--gin.TextTask.corpus='text_files'",
        f"--gin.TextTask.text_files='{tmp_path}/texts/*.txt'",
        "--gin.TextTask.vocabulary='bpe:270'",
        "--gin.TextTask.validation_fraction=0.25",
        "--gin.STEPS=2",
        "--gin.LENGTH=32",
        "--gin.WARMUP_STEPS=0",
    ]
    first = succeed("experiments.sweeps.run", *flags, *more)
    repeated = succeed("experiments.sweeps.run", *flags, "--dry_run", *more)
    assert repeated.stdout.endswith("# 2 of 2 points have ended\n")
    results = json.loads((tmp_path / "rescorers_tiny" / "results.json").read_text())
    assert list(results) == NAMES
    for result in results.values():
        assert f"{result['validation_loss']:.4f}" in first.stdout
