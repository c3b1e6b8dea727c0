"""The commands of docs/training.md, and the runs of all pages, without training."""

import pathlib
import re
import shlex

import pytest

from bpd_jax.base.configuration import parse
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from experiments.sweeps.catalog import SWEEPS
from tests.commands import call, start
from tests.experiments.configurations import gin_arguments

ROOT = pathlib.Path(__file__).parent.parent.parent


def commands(page: str) -> list[list[str]]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [
        shlex.split(line, comments=True)[2:]
        for block in blocks
        for line in block.replace("\\\n", "").splitlines()
        if line.startswith("python -m ")
    ]


PAGE = (ROOT / "docs" / "training.md").read_text()
COMMANDS = [
    words
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for words in commands(path.read_text())
]
RUNS = [words for words in COMMANDS if words[0] == "bpd_jax.train"]
LAUNCHERS = (
    "experiments.launch.slurm",
    "experiments.launch.tpu",
    "experiments.sweeps.run",
)


@pytest.mark.parametrize("words", dict.fromkeys(map(tuple, RUNS)), ids=" ".join)
def test_runs_resolve(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    if "--dry_run" in words:
        result = call(*words)
        assert result.returncode == 0, result.stderr
        assert "tokens per step: " in result.stdout
        return
    files, bindings = gin_arguments(words[1:])
    assert len(files) + len(bindings) + 1 == len(words[1:])
    if any("runs/finetune/" in text or "gsm8k" in text for text in (*files, *bindings)):
        return  # Made by an earlier command, or by the tutorial itself.
    assert all((ROOT / name).is_file() for name in files)
    config = parse(files, bindings, TrainConfig, HeadsTrainConfig).value
    assert isinstance(config, TrainConfig | HeadsTrainConfig)


@pytest.mark.parametrize("module", LAUNCHERS)
def test_launches_and_sweeps_pass_dry_run(module, storage):
    commands = [
        [
            "--dry_run",
            *(word.replace("gs://BUCKET", "gs://bpd-test") for word in words[1:]),
        ]
        for words in COMMANDS
        if words[0] == module
    ]
    assert commands
    for result in start(module, *commands):
        assert result.returncode == 0, result.stderr


def test_the_table_lists_every_sweep():
    section = PAGE.partition("## 8. Sweeps")[2]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\w, ]+) \|$", section, re.MULTILINE)
    assert rows == [(name, ", ".join(sweep.grids)) for name, sweep in SWEEPS.items()]
