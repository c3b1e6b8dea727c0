"""The size `small`: its gin files, and the order of the stages of its script."""

import gzip
import pathlib
import shutil
import subprocess

import pytest

from bpd_jax.base import configuration
from bpd_jax.models.config_files import load_config
from bpd_jax.models.parameters import count_parameters
from bpd_jax.studies.study_config import StudyConfig
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.exported_params import load_run_parameters
from tests.experiments.configurations import folders_read, gin_arguments

ROOT = pathlib.Path(__file__).parent.parent.parent
RECIPE = "experiments/small/recipe.sh"
TRAINED = ("cnn_dailymail", "squad", "samsum")

# Replaces Python: logs its arguments and creates the outputs of the command.
STUB = """#!/usr/bin/env bash
echo "$*" >> commands.txt
for word in "$@"; do
    case $word in
        --output=*.html) touch "${word#*=}" ;;
        --output=*)
            mkdir -p "${word#*=}"
            touch "${word#*=}"/{slim,rows,ngram_model}.json ;;
    esac
done
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = recipe_folder(tmp_path_factory.mktemp("small"))
    for task in TRAINED:
        path = folder / "data" / task / "train.jsonl.gz"
        path.parent.mkdir(parents=True)
        count = 100 if task == "cnn_dailymail" else 1000
        path.write_bytes(gzip.compress(b"{}\n" * count))
    (folder / "data/samsum/test.jsonl.gz").touch()
    return folder, run_recipe(folder)


def recipe_folder(folder):
    shutil.copytree(
        ROOT / "experiments/small/model", folder / "experiments/small/model"
    )
    shutil.copy(ROOT / RECIPE, folder / RECIPE)
    (folder / "python").write_text(STUB)
    (folder / "python").chmod(0o755)
    return folder


def run_recipe(folder, *stages):
    result = subprocess.run(
        ["bash", RECIPE, "text/*.txt", "data", *stages],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHON_BIN": "./python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    commands = folder / "commands.txt"
    lines = commands.read_text().splitlines() if commands.exists() else []
    commands.unlink(missing_ok=True)
    return [line.split() for line in lines]


def trainings(commands):
    configs = {}
    for words in commands:
        if words[1] != "bpd_jax.train":
            continue
        [workdir] = [word for word in words if word.startswith("--workdir=")]
        folder = workdir.rpartition("/")[2]
        files, bindings = gin_arguments(words[2:])
        bindings.insert(0, "TransformerConfig.vocab_size=8192")
        configs[folder] = configuration.parse(files, bindings, TrainConfig).value
    return configs


def test_every_training_run_has_a_valid_configuration(recipe):
    runs = trainings(recipe[1])
    assert list(runs) == [
        "base",
        *("shallow", "deep", "wide"),
        *TRAINED,
        *(f"deep_{task}" for task in TRAINED),
    ]
    base = runs["base"]
    assert base.model.block_size == 9
    assert base.lambdas == (1, *[0.01] * 8)
    assert 8e6 < count_parameters(base.model)["total"] < 15e6
    sizes = []
    for name in ("shallow", "deep", "wide"):
        # They share the rows.
        assert (runs[name].task, runs[name].length) == (base.task, base.length)
        sizes.append(count_parameters(runs[name].model)["total"])
    assert sizes == sorted(set(sizes))
    for name in TRAINED:
        for run, start in ((name, "base"), (f"deep_{name}", "deep")):
            assert runs[run].start == f"runs/small/training/{start}"
            assert runs[run].model == runs[start].model
        # The reported split does not select the checkpoint.
        source = runs[name].task.validation_from
        assert source == ("validation" if name == "samsum" else "train")
    assert runs["cnn_dailymail"].steps < runs["squad"].steps


def test_studies_have_all_models(recipe):
    folder, _ = recipe
    files = list((ROOT / "experiments").glob("*/small.gin"))
    assert files
    for path in files:
        study = f"StudyConfig.study={path.parent.name!r}"
        config = configuration.parse([path], [study], StudyConfig).value
        for model_folder in folders_read(config):
            assert (folder / model_folder).is_dir(), path
    news = folder / "runs/small/xsum"
    assert news.resolve() == (folder / "runs/small/cnn_dailymail").resolve()


def test_the_committed_model_replaces_pretraining(tmp_path):
    """It can be exported and finetuned, and does not replace a run."""
    recipe_folder(tmp_path)
    [words] = run_recipe(tmp_path, "pretrained")
    assert words[1] == "bpd_jax.export_params"
    assert run_recipe(tmp_path, "pretrained") == []
    base = tmp_path / "runs/small/training/base"
    config = load_config(base / "model.json")
    bindings = ["TransformerConfig.vocab_size=8192", "TEXT_FILES='text/*.txt'"]
    files = ["experiments/small/pretrain.gin"]
    assert config == configuration.parse(files, bindings, TrainConfig).value.model
    params = load_run_parameters(base, config)
    assert params["trunk"]["embedding"].shape == (8192, 256)
    shutil.rmtree(tmp_path / "runs/small/lambada")
    (base / "checkpoints").mkdir()
    with pytest.raises(AssertionError, match="holds a training run"):
        run_recipe(tmp_path, "pretrained")


def test_finished_stages_are_skipped(recipe):
    folder, first = recipe
    assert len(first) > 20
    repeated = run_recipe(folder)
    assert [words[1] for words in repeated] == ["experiments.run", "bpd_jax.report"]
    shutil.rmtree(folder / "runs/small/deep")
    missing = run_recipe(folder, "rescorers")
    assert [words[1] for words in missing] == ["bpd_jax.train", "bpd_jax.export_params"]
