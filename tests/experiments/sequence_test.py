"""The sequence of commands in docs/training.md: each reads the output of earlier ones.

The commands are those of the page. The fast tests check that the folders that a command
reads were made by an earlier command, and that studies find all their models; the
exhaustive one runs the sequence for a laptop on a few small records.
"""

import os
import pathlib
import re
import shlex
from typing import NamedTuple

import numpy as np
import pytest

from bpd_jax.base import configuration
from bpd_jax.studies.run_files import open_run
from bpd_jax.studies.study_config import StudyConfig
from bpd_jax.studies.study_records import DraftRecord
from experiments.sweeps import catalog
from tests.commands import succeed
from tests.experiments.configurations import folders_read, gin_arguments
from tests.json_lines import write_json_lines

ROOT = pathlib.Path(__file__).parent.parent.parent
SECTION = (ROOT / "docs" / "training.md").read_text().partition("## 9. The whole")[2]
BLOCKS = re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)
# `docs_site_test` runs launchers dry.
PAPER, LARGER, LINKS, LAPTOP = (x for x in BLOCKS if "experiments.launch" not in x)
STUDIES = {
    PAPER: sorted((ROOT / "experiments").glob("*/paper.gin")),
    LAPTOP: [ROOT / "experiments/table4/tiny.gin"],
}


class Step(NamedTuple):
    words: list[str]
    reads: set[str]
    makes: str


def steps_of(block):
    """The commands of a block; `# A; the same for B and C` repeats the next one."""
    steps, names = [], [""]
    for line in block.replace("\\\n", " ").splitlines():
        repeat = re.fullmatch(r"# (\w+); the same for (.*)", line)
        if repeat:
            names = [repeat[1], *re.split(r", | and ", repeat[2])]
        elif line and not line.startswith("#"):
            line = line.partition("  #")[0]
            repeated = [line.replace(names[0], name) for name in names if names[0]]
            steps += [step_of(command) for command in repeated or [line]]
            names = [""]
    return steps


def step_of(line):
    words = shlex.split(line)
    if words[:2] == ["ln", "-s"]:
        link = pathlib.PurePosixPath(words[3])
        return Step(words, {str(link.parent / words[2])}, str(link))
    assert words[:2] == ["python", "-m"]
    reads, makes = set(), ""
    for word in words[3:]:
        name, _, value = word.rpartition("=")
        value = value.strip("'")
        if name in ("--workdir", "--output"):
            makes = value
        elif value.startswith("runs/"):
            reads.add(value)
    if words[2] == "experiments.run":
        makes = makes or "runs/paper/paper"
    return Step(words[2:], reads, makes)


def read_by_studies(path, steps):
    files, bindings = [path], []
    for step in steps:
        if step.words[0] == "experiments.run":
            more_files, more_bindings = gin_arguments(step.words[1:])
            files += more_files
            bindings += more_bindings
    bindings.append(f"StudyConfig.study={path.parent.name!r}")
    config = configuration.parse(files, bindings, StudyConfig).value
    # LAMBADA has no in-domain models.
    folders = folders_read(config)
    return {folder for folder in folders if not folder.endswith("_lambada")}


@pytest.mark.parametrize("block", [PAPER, LAPTOP], ids=["paper", "laptop"])
def test_every_folder_is_made_before_it_is_read(block):
    folders = set()
    steps = steps_of(block)
    for step in steps:
        assert step.reads <= folders, step.words
        assert step.makes not in folders, step.words
        folders.add(step.makes)
    for path in STUDIES[block]:
        assert read_by_studies(path, steps) <= folders, path
    modules = [step.words[0] for step in steps]
    assert modules[0] == "bpd_jax.train"
    assert modules[-2:] == ["experiments.run", "bpd_jax.report"]
    assert "bpd_jax.build_ngram" in modules


def test_larger_models_and_those_of_sweeps_have_the_names_of_the_sequence():
    makes = {step.makes for step in steps_of(PAPER)}
    (step,) = steps_of(LARGER)
    path = ROOT / "experiments/table_e/paper.gin"
    assert step.reads == read_by_studies(path, [step])
    assert step.reads <= {name.replace("7b", "13b") for name in makes}
    links = steps_of(LINKS)
    assert {step.makes for step in links} <= makes
    assert {folder for step in links for folder in step.reads} == {
        f"runs/sweeps/{sweep}_{catalog.PAPER}/{point}"
        for sweep in ("finetune", "rescorers")
        for point in catalog.SWEEPS[sweep].points(catalog.PAPER)
    }


def write_data(folder):
    rng = np.random.default_rng(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "un")]
    words = ["".join(rng.choice(syllables, 3)) for _ in range(400)]

    def text(length):
        return " ".join(rng.choice(words, length)) + "."

    write_json_lines(
        folder / "c4" / "train.jsonl.gz", [{"text": text(40)} for _ in range(120)]
    )
    passages = [{"passage": text(12)} for _ in range(6)]
    write_json_lines(folder / "lambada" / "test.jsonl.gz", passages)
    question = {"title": "made up", "question": "Which?", "answers": {"text": ["a"]}}
    for split, count in (("train", 60), ("validation", 6)):
        records = [{**question, "context": text(15)} for _ in range(count)]
        write_json_lines(folder / "squad" / f"{split}.jsonl.gz", records)


# Fewer steps and shorter rows for every recipe, and fewer examples.
SMALLER = {
    "bpd_jax.train": [
        "--gin.STEPS=4",
        "--gin.LENGTH=96",
        "--gin.TrainConfig.evaluate_every=2",
        "--gin.TrainConfig.evaluate_batches=1",
        "--gin.TrainConfig.checkpoint_every=2",
    ],
    "experiments.run": ["--limit=1"],
}


@pytest.mark.exhaustive
def test_the_sequence_runs_at_the_size_of_a_laptop(tmp_path, monkeypatch):
    pytest.importorskip("seqio")
    # A laptop has one device; a batch of two cannot be divided among eight.
    flags = re.sub(r"(device_count)=\d+", r"\1=1", os.environ["XLA_FLAGS"])
    monkeypatch.setenv("XLA_FLAGS", flags)
    for name in ("gin_configs", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    data = tmp_path / "data"
    write_data(data)
    outputs = {}
    for step in steps_of(LAPTOP):
        if step.words[0] == "ln":
            (tmp_path / step.words[3]).symlink_to(step.words[2])
            continue
        words = [word.replace("FOLDER", str(data)) for word in step.words]
        words += SMALLER.get(words[0], [])
        result = succeed(*words, folder=tmp_path)
        outputs[step.makes] = result.stdout + result.stderr
        assert (tmp_path / step.makes).exists()
    assert "runs/finetune/base" in outputs["runs/finetune/squad"]
    run = open_run(tmp_path / "runs/finetune/studies/table4")
    assert run.facts["left_out"] == {}
    assert run.facts["alphas"].keys() == {"ngram", "neural"}
    measured = {(record.task, record.contender) for record in run.of(DraftRecord)}
    assert {task for task, _ in measured} == {"lambada", "squad"}
    refined = {"ngram:1@c4_2", "neural:1@rescorer", "neural:1@in_domain"}
    assert {name for _, name in measured} == {"bpd", *refined, "oracle"}
    assert len(measured) == 10
