import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.rows import make_batch, open_rows
from bpd_jax.models.attachment_files import load_refiner
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.trained_refiners import markov_scores
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.frozen import measure
from bpd_jax.training.metrics import read_rows
from bpd_jax.training.refiner_sources import (
    RefinerTrainConfig,
    held_out_rows,
    outputs_of_rows,
)
from bpd_jax.training.refiners import RefinerObjective, train_refiner
from tests.data.row_files import save_rows
from tests.decoding.random_models import random_params

VOCAB = 280


def settings(**changes):
    """The settings of a training, without the name of the model."""
    optimizer = OptimizerConfig(1e-2, warmup_steps=0.05)
    return RefinerTrainConfig(model="model", optimizer=optimizer, **changes)


def write_rows(folder, seed, rows):
    """Rows of 7 tokens, 3 and padding, whose tokens have two possible successors."""
    rng = np.random.default_rng(seed)
    tokens = np.zeros((rows, 12), np.int64)
    tokens[:, 0] = rng.integers(0, VOCAB, rows)
    for i in range(1, 12):
        tokens[:, i] = (7 * tokens[:, i - 1] + rng.integers(0, 2, rows)) % 50
    segment_ids = np.tile([1] * 7 + [2] * 3 + [0] * 2, (rows, 1))
    save_rows(
        folder,
        tokens * (segment_ids > 0),
        segment_ids,
        split=folder.name,
        vocabulary=f"bpe:{VOCAB}",
        vocab_size=VOCAB,
        end_of_text=0,
        fingerprint={},
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "train", 0, 64)
    write_rows(folder / "validation", 1, 10)
    return folder


def evaluate(config, refiner, model, params, batches, freeze):
    """Sums over held-out batches."""
    objective = RefinerObjective(config, model, freeze, model_targets=False)
    return measure(objective, refiner, frozen=params, batches=batches)


def losses(folder):
    """The logged losses of a training."""
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


def random_refiner(config):
    """Parameters without zeros."""
    shapes = jax.eval_shape(lambda: config.init(jax.random.key(0)))
    return random_params(shapes, 0.5, 5)


def walk(config, refiner, tokens, plain):
    """Logits of every level after one text, given the true tokens that follow it.

    Written with the functions that decoding calls, all tokens being candidates.
    """
    every_token = jnp.arange(VOCAB)[None, None]
    for level in range(1, min(config.num_heads, len(tokens))):
        previous = jnp.asarray(tokens[level - 1])[None, None]
        scores = markov_scores(refiner, previous, every_token, level)
        yield plain[level] + np.asarray(scores)[0, 0]


def test_held_out_sums_equal_a_walk_with_the_functions_of_decoding(model, params, data):
    config = settings(rank=8).config_for(model)
    refiner = random_refiner(config)
    rows = open_rows(data / "validation")
    batches = held_out_rows(rows, 2, 3)
    held_out = evaluate(config, refiner, model, params, batches, outputs_of_rows)

    chosen_rows = [0, 3, 6]  # Three of ten rows, spread evenly.
    batch = make_batch(rows.tokens[chosen_rows], rows.segment_ids[chosen_rows])
    lm, variables = BlockwiseLM(model), {"params": params}
    mask = causal_mask(jnp.asarray(batch.segment_ids))
    hidden, *_ = jax.jit(lm.apply)(variables, batch.tokens, batch.positions, mask)
    head_logits = jax.jit(functools.partial(lm.apply, method="head_logits"))
    plain = np.asarray(head_logits(variables, hidden))
    levels = config.num_heads - 1
    want = {name: np.zeros((4, levels)) for name in held_out._fields}
    for row, i in np.ndindex(3, 10):
        end = 7 if i < 7 else 10
        following = batch.tokens[row, i + 1 : end]
        logits = walk(config, refiner, following, plain[row, i])
        for level, refined in enumerate(logits, start=1):
            guesses = {"plain": plain[row, i, level], "refined": refined}
            # The model's own token is what head 1 predicts one position earlier.
            answers = {
                "text": following[level],
                "model": plain[row, i + level, 0].argmax(),
            }
            for (guess, values), (name, answer) in itertools.product(
                guesses.items(), answers.items()
            ):
                loss = np.logaddexp.reduce(values) - values[answer]
                correct = values.argmax() == answer
                want[f"{guess}_{name}"][:, level - 1] += [loss, correct, 1, 1]
    for name, sums in held_out._asdict().items():
        np.testing.assert_allclose(np.stack(sums), want[name], rtol=1e-4)
    assert want["plain_model"][2].tolist() == [3 * (5 + 1), 3 * 4]


def test_a_trained_refiner_is_saved_with_its_figures(model, params, data, tmp_path):
    original = jax.tree.map(np.array, params)
    config = settings(targets="text", steps=40, batch_size=8, rank=8)
    folder = tmp_path / "deep" / "run"
    held_out = train_refiner(config, model, params, data, folder)
    jax.tree.map(np.testing.assert_array_equal, params, original)
    columns = held_out.columns()
    assert columns["refined_text_loss"][0] < columns["plain_text_loss"][0]
    loaded = load_refiner(folder / "markov")
    assert loaded.base == fingerprint(model, params)
    assert loaded.facts["settings"]["steps"] == 40
    figures = loaded.facts["held_out"]["refined_text_loss"]
    np.testing.assert_allclose(figures, columns["refined_text_loss"], atol=1e-5)
    batches = held_out_rows(open_rows(data / "validation"), 8, 1000)
    arguments = loaded.config, loaded.params, model, params, batches, outputs_of_rows
    jax.tree.map(np.testing.assert_allclose, evaluate(*arguments), held_out)


def test_resumed_training_equals_an_uninterrupted_one(
    model, params, data, tmp_path, stopped_at
):
    config = settings(steps=25, batch_size=4, rank=8)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train_refiner(config, model, params, data, whole)
    calls = stopped_at(7)
    with pytest.raises(SystemExit):
        train_refiner(config, model, params, data, stopped)
    assert not (stopped / "markov").exists()
    refused("other settings", settings(), model, params, data, stopped)
    train_refiner(config, model, params, data, stopped)
    assert len(calls) == 25
    want, got = (load_refiner(folder / "markov") for folder in (whole, stopped))
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
    assert losses(whole) == losses(stopped)


def refused(message, config, model, params, data, folder):
    with pytest.raises(UserError, match=message):
        train_refiner(config, model, params, data, folder)


def test_mismatched_settings_are_refused_before_any_write(
    model, make_model, params, data, tmp_path
):
    markov = settings(steps=2, batch_size=4)
    folder = tmp_path / "run"
    plain = make_model(None)
    refused("no block heads", markov, plain, params, data, folder)
    small = dataclasses.replace(
        model, trunk=dataclasses.replace(model.trunk, vocab_size=99)
    )
    refused("vocabulary of 280 tokens", markov, small, params, data, folder)
    short = dataclasses.replace(
        model, trunk=dataclasses.replace(model.trunk, max_length=8)
    )
    refused("max_length of 8", markov, short, params, data, folder)
    refused("does not hold token files", markov, model, params, tmp_path, folder)
    assert list(tmp_path.iterdir()) == []
    optimizer = OptimizerConfig(1e38)
    diverging = dataclasses.replace(markov, optimizer=optimizer, steps=40)
    refused("not finite: lower Optimizer", diverging, model, params, data, folder)
    assert not (folder / "markov").exists()
