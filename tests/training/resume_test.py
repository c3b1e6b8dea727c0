"""How runs end and resume: best checkpoint, early stopping, compute settings."""

import dataclasses

import jax
import numpy as np

from bpd_jax.decoding.loading import load_model
from bpd_jax.training import trainer
from bpd_jax.training.checkpoints import best_step
from bpd_jax.training.trainer import train
from tests.training.runs import parameters


def steps(run):
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir())


def script(monkeypatch, losses):
    """Lets evaluations measure the given losses, one after the other."""

    class Scripted:
        def __init__(self, config, *_):
            self.heads = config.model.block_size

        def __call__(self, params):
            loss = losses.pop(0)
            heads = range(1, self.heads + 1)
            return {
                "validation_loss": loss,
                **{f"validation_loss_head_{h}": loss for h in heads},
                **{f"validation_accuracy_head_{h}": 1 / loss for h in heads},
                **{f"validation_entropy_head_{h}": loss for h in heads},
            }

    monkeypatch.setattr(trainer, "Evaluator", Scripted)


def test_best_checkpoint_is_decoded_and_early_stop_is_remembered(
    train_config, tmp_path, monkeypatch, capsys
):
    config = dataclasses.replace(
        train_config,
        steps=20,
        evaluate_every=1,
        checkpoint_every=1,
        keep_checkpoints=1,
        patience=3,
    )
    script(monkeypatch, [5.0, 4.0, 4.5, 4.2, 4.1])
    assert train(config, tmp_path)["validation_loss"] == 4.1
    printed = capsys.readouterr().out
    assert "stopped early at step 5: " in printed
    assert "best validation_loss 4 at step 2" in printed
    assert steps(tmp_path) == [2, 5]
    assert best_step(tmp_path / "checkpoints") == 2
    loaded = load_model(str(tmp_path))
    assert loaded.step == 2
    params = loaded.params
    jax.tree.map(np.testing.assert_array_equal, params, parameters(tmp_path, 2))
    assert "using the best checkpoint, that of step 2" in capsys.readouterr().err
    # The same command again does nothing.
    assert train(config, tmp_path) == {}
    message = "stopped early at step 5, after 3 evaluations without"
    assert message in capsys.readouterr().out
    # With more patience it resumes, and a better evaluation replaces the best.
    script(monkeypatch, [4.3, 3.0, *[3.5] * 5])
    train(dataclasses.replace(config, patience=5), tmp_path)
    assert steps(tmp_path) == [7, 12]
    assert best_step(tmp_path / "checkpoints") == 7


def test_best_evaluation_is_saved_between_checkpoints(
    train_config, tmp_path, monkeypatch
):
    config = dataclasses.replace(
        train_config,
        steps=6,
        evaluate_every=1,
        checkpoint_every=100,
        select_by="validation_accuracy_head_2",
    )
    script(monkeypatch, [5.0, 6.0, 4.0, 4.5, 4.5, 4.5])
    train(config, tmp_path)
    assert steps(tmp_path) == [3, 6]
    assert best_step(tmp_path / "checkpoints") == 3
