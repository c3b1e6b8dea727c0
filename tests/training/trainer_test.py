import dataclasses
import gc
import json
import os
import shutil
import signal
import weakref

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.config_files import load_config
from bpd_jax.models.partitioning import replicated
from bpd_jax.training import trainer
from bpd_jax.training.metrics import read_rows
from bpd_jax.training.trainer import train
from tests.training.runs import logged, parameters, with_trunk


class Killed(Exception):
    """Ends a run as abruptly as a test can."""


def act_at(monkeypatch, call, act):
    """Calls `act` before the batch of the given training step is returned."""
    original, calls = trainer.RowIterator.__next__, []

    def replacement(self):
        calls.append(1)
        if len(calls) == call:
            act()
        return original(self)

    monkeypatch.setattr(trainer.RowIterator, "__next__", replacement)


@pytest.fixture(scope="module")
def finished(train_config, tmp_path_factory):
    """A complete run, never interrupted."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, train(train_config, folder, "text", "operative")


def assert_same_run(left, right):
    jax.tree.map(np.testing.assert_array_equal, parameters(left), parameters(right))
    assert logged(left) == logged(right)


def test_run_folder_is_complete(finished, train_config):
    folder, metrics = finished
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.gin",
        "data",
        "data.json",
        "metrics.jsonl",
        "model.json",
        "operative.gin",
        "task.json",
        "tensorboard",
        "tokenizer.json",
        "versions.json",
    ]
    assert load_config(folder / "model.json") == train_config.model
    task = json.loads((folder / "task.json").read_text())
    assert task == dataclasses.asdict(train_config.task)
    assert json.loads((folder / "versions.json").read_text())["jax"] == jax.__version__
    rows = read_rows(folder / "metrics.jsonl")
    training = [row for row in rows if "loss" in row]
    validation = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in training] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in validation] == [4, 6]
    assert validation[-1] == {"step": 6, **metrics}
    heads = [metrics[f"validation_loss_head_{head}"] for head in (1, 2, 3)]
    np.testing.assert_allclose(metrics["validation_loss"], sum(heads), rtol=1e-6)
    assert max(heads) < np.log(280)
    assert training[1]["tokens_per_second"] > 0
    assert training[0]["learning_rate"] == pytest.approx(5e-3)


def test_killed_run_equals_an_uninterrupted_one(
    finished, train_config, tmp_path, monkeypatch
):
    def kill():
        raise Killed

    with monkeypatch.context() as patch:
        act_at(patch, 6, kill)
        with pytest.raises(Killed):
            train(train_config, tmp_path)
    # The row of step 5 lies after the last checkpoint, that of the first evaluation.
    assert read_rows(tmp_path / "metrics.jsonl")[-1]["step"] == 5
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]
    train(train_config, tmp_path)
    assert_same_run(finished[0], tmp_path)


def test_finished_run_is_not_changed(finished, train_config, capsys):
    folder, _ = finished
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert train(train_config, folder) == {}
    assert "already finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times


def test_other_model_or_task_is_refused(finished, train_config, make_model):
    folder, _ = finished
    other_config = dataclasses.replace(train_config, model=make_model(heads=4))
    with pytest.raises(
        UserError, match=r"heads.num_heads is 3 in its model.json and 4"
    ):
        train(other_config, folder)
    task = dataclasses.replace(train_config.task, validation_fraction=0.3)
    with pytest.raises(UserError, match=r"validation_fraction is 0.2 in its task.json"):
        train(dataclasses.replace(train_config, task=task), folder)
    with pytest.raises(UserError, match=r"length is 16 in its data/train and 12"):
        train(dataclasses.replace(train_config, length=12), folder)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("task.json", "[]", "cannot read .*task.json: "),
        ("data.json", "{", "cannot read .*data.json: "),
        ("model.json", None, "has checkpoints but no model.json: restore"),
        ("data.json", None, "has checkpoints but no data.json: restore"),
        ("data.json", "{}", "cannot read .*data.json: .* train split"),
    ],
)
def test_damaged_or_missing_descriptions_are_reported(
    finished, train_config, tmp_path, name, text, message
):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    file = run / name
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(UserError, match=message):
        train(train_config, run)
    assert (file.read_text() if file.exists() else None) == text


def test_settings_that_do_not_fit_each_other_are_refused(train_config, tmp_path):
    config = dataclasses.replace(train_config, batch_size=6)
    with pytest.raises(UserError, match=r"batch_size = 6 is not a multiple of .* = 8"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    model = with_trunk(train_config.model, vocab_size=300)
    with pytest.raises(UserError, match=r"has 280 tokens but .*vocab_size is 300"):
        train(dataclasses.replace(train_config, model=model), tmp_path)


def test_start_parameters_are_loaded_once_trained_and_freed(
    train_config, params, tmp_path, monkeypatch
):
    original = jax.device_get(params["trunk"])
    optimizer = dataclasses.replace(train_config.optimizer, trunk_learning_rate=1e-5)
    config = dataclasses.replace(train_config, optimizer=optimizer, steps=2)
    alive = []

    def load(mesh):
        trunk = jax.device_put(original, replicated(mesh))
        alive.extend(map(weakref.ref, jax.tree.leaves(trunk)))
        return {"trunk": trunk}

    counts = []

    def count():
        gc.collect()
        counts.append(sum(leaf() is not None for leaf in alive))

    with monkeypatch.context() as patch:
        act_at(patch, 1, count)
        train(config, tmp_path, load_start=load)
    assert alive
    assert counts == [0]
    changes = jax.tree.map(
        lambda x, y: float(np.abs(x - y).max()), original, parameters(tmp_path)["trunk"]
    )
    # The steps of Adam are at most about the rate of the trunk.
    assert 1e-6 < max(jax.tree.leaves(changes)) < 1e-4

    def fail(mesh):
        raise AssertionError("a run that goes on does not need it")

    train(dataclasses.replace(config, steps=3), tmp_path, load_start=fail)


def test_signal_saves_a_checkpoint_and_the_same_command_resumes(
    train_config, tmp_path, monkeypatch, capsys
):
    """Stopped at step 3: the means over steps 1 to 4 are those of the whole run."""
    config = dataclasses.replace(train_config, log_every=4)
    train(config, tmp_path / "whole")

    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        act_at(patch, 3, terminate)
        with pytest.raises(SystemExit) as stopped:
            train(config, tmp_path / "parts")
    assert stopped.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == handler
    assert "saved at step 3 of 6; run the same command" in capsys.readouterr().out
    train(config, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_diverging_run_ends_with_a_sentence_and_can_resume(train_config, tmp_path):
    """The first steps are finite; a learning rate of 1e30 makes later ones diverge."""
    config = dataclasses.replace(train_config, steps=2, log_every=4)
    train(config, tmp_path)
    original = parameters(tmp_path)
    # After step 3 the parameters are huge, and the loss of step 4 is not a number.
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1e30)
    diverging = dataclasses.replace(
        config, optimizer=optimizer, steps=8, checkpoint_every=8, evaluate_every=8
    )
    message = r"step 4 is not finite: lower .*learning_rate .* from checkpoint 2; "
    with pytest.raises(UserError, match=message):
        train(diverging, tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2"]
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path), original)
    # The same command with a usable rate resumes from the last good checkpoint.
    train(dataclasses.replace(diverging, optimizer=config.optimizer), tmp_path)
    assert read_rows(tmp_path / "metrics.jsonl")[-1]["step"] == 8


@pytest.mark.parametrize("name", ["run", "run/checkpoints"])
def test_file_in_place_of_a_folder_is_reported_before_any_write(
    train_config, tmp_path, name
):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("in the way")
    with pytest.raises(UserError, match=r"it is a file|is not a folder"):
        train(train_config, tmp_path / "run")
    assert path.read_text() == "in the way"
    assert not (tmp_path / "run" / "data").exists()
