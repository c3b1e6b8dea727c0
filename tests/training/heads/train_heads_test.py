import dataclasses

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.models.attachment_files import attach_heads, load_heads
from bpd_jax.models.blockwise_config import BlockHeadsConfig
from bpd_jax.training import hosts
from bpd_jax.training.heads import train_heads as module
from bpd_jax.training.heads.train_heads import train_heads
from bpd_jax.training.metrics import read_rows
from tests.training.runs import logged, with_trunk


def test_heads_are_trained_on_states_in_memory(tmp_path, config, model, params):
    config = dataclasses.replace(config, mode="ring", ring_positions=600, epochs=12)
    held_out = train_heads(config, model, params, tmp_path)
    # Tokens have two possible successors: four tokens for head 2, eight for head 3.
    top, coverage = held_out.tops(), held_out.coverage
    assert 0.6 < min(coverage) < 1
    assert top[4][0] > 0.8 * coverage[0]
    assert top[8][1] > 0.7 * coverage[1]
    assert top[16][0] <= coverage[0]
    assert not (tmp_path / "states").exists()


def test_trained_heads_are_attached_to_their_model(
    tmp_path, config, model, params, base_key
):
    config = dataclasses.replace(config, epochs=1)
    held_out = train_heads(config, model, params, tmp_path)
    assert (tmp_path / "states").exists()
    loaded = load_heads(tmp_path / "heads")
    assert (loaded.config, loaded.base, loaded.base_name) == (
        config.heads,
        base_key,
        "tiny",
    )
    assert loaded.facts["accuracies"] == held_out.accuracies
    assert np.shape(held_out.accuracies) == (3, 16)
    rows, column = read_rows(tmp_path / "metrics.jsonl"), "validation_top_4_head_3"
    [*_, last] = [row[column] for row in rows if column in row]
    assert last == held_out.tops()[4][1]
    assert "folder" not in (tmp_path / "heads" / "heads.json").read_text()
    # The draft vocabulary is that of the most frequent tokens.
    attached_config, attached = attach_heads(model, params, loaded)
    assert attached_config.heads == config.heads
    vocabulary = np.asarray(attached["heads"]["vocabulary"])
    counts = module.make_plan(config, model, params).counts
    left_out = np.setdiff1d(np.arange(len(counts)), vocabulary)
    assert counts[vocabulary].min() >= counts[left_out].max()


def test_resumed_run_equals_an_uninterrupted_one(
    tmp_path, config, stopped_at, model, params
):
    # The run stops between two rows of metrics.
    config = dataclasses.replace(config, epochs=3, checkpoint_every=1000, log_every=4)
    train_heads(config, model, params, tmp_path / "whole")

    calls = stopped_at(11)
    with pytest.raises(SystemExit):
        train_heads(config, model, params, tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "heads").exists()
    train_heads(config, model, params, tmp_path / "stopped")
    steps = load_heads(tmp_path / "whole" / "heads").facts["steps"]
    assert len(calls) == steps > 11
    want, got = (
        load_heads(tmp_path / name / "heads").tensors for name in ("whole", "stopped")
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert logged(tmp_path / "stopped") == logged(tmp_path / "whole")
    # A run does not resume from a checkpoint of other settings.
    other_config = dataclasses.replace(config, seed=1)
    with pytest.raises(UserError, match="other settings"):
        train_heads(
            other_config, model, params, tmp_path / "stopped", "other = 1", "other"
        )
    for name in ("config.gin", "operative.gin"):
        assert (tmp_path / "stopped" / name).read_text() == ""


def test_conditioned_heads_are_trained(tmp_path, config, model, params):
    """`heads_objective_test` compares their gradients."""
    heads = BlockHeadsConfig(3, 16, reads_anchor=True, feature_layers=(0,))
    config = dataclasses.replace(config, heads=heads, epochs=1, products="bfloat16")
    train_heads(config, model, params, tmp_path)
    assert load_heads(tmp_path / "heads").config == heads


def test_texts_of_another_vocabulary_are_refused(config, tmp_path, model, params):
    with pytest.raises(UserError, match="vocabulary of 61 tokens"):
        train_heads(config, with_trunk(model, vocab_size=70), params, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_several_processes_are_refused(monkeypatch, tmp_path, config, model, params):
    monkeypatch.setattr(hosts, "count", lambda: 2)
    with pytest.raises(UserError, match="are trained by one process"):
        train_heads(config, model, params, tmp_path)
    assert list(tmp_path.iterdir()) == []
