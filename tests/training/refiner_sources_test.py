"""Refiners on cached states, for heads with a draft vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.data.generations import open_generations, write_header, write_shard
from bpd_jax.errors import UserError
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.heads import init_heads
from bpd_jax.models.refiner_files import load_refiner
from bpd_jax.models.refiners import init_refiner
from bpd_jax.training.config import OptimizerConfig
from bpd_jax.training.heads.base import Base
from bpd_jax.training.heads.cache import cached_states, open_states
from bpd_jax.training.heads.loss import LevelSums
from bpd_jax.training.heads.positions import split_texts
from bpd_jax.training.optimizer import make_optimizer
from bpd_jax.training.refiner_loss import (
    freeze_rows,
    freeze_states,
    head_sums,
    refined_sums,
)
from bpd_jax.training.refiner_settings import RefinerSettings
from bpd_jax.training.refiner_sources import open_source
from bpd_jax.training.refiners import (
    HeldOut,
    evaluate,
    make_step,
    table,
    train_refiner,
)

VOCABULARY = np.arange(0, 60, 2, dtype=np.int32)


@pytest.fixture(scope="module")
def base(model, params):
    """The tiny model with heads that choose from the even ones of 60 tokens."""
    heads = BlockHeadsConfig(3, 8, draft_vocabulary=len(VOCABULARY))
    trunk = BlockwiseConfig(model.trunk)
    added = init_heads(trunk, params, heads, jax.random.key(0), VOCABULARY)
    rng = np.random.default_rng(0)
    added["kernel_out"] += rng.normal(0, 0.3, added["kernel_out"].shape)
    return BlockwiseConfig(model.trunk, heads), {
        "trunk": params["trunk"],
        "heads": added,
    }


@pytest.fixture(scope="module")
def states(tmp_path_factory, base):
    """The folder of states of texts in which each token tells much of the next."""
    config, params = base
    folder = tmp_path_factory.mktemp("states")
    rng = np.random.default_rng(1)
    texts = []
    for _ in range(150):
        text = [int(rng.integers(0, 50))]
        for _ in range(13):
            text.append((7 * text[-1] + int(rng.integers(0, 2))) % 50)
        texts.append(np.array(text))
    key = fingerprint(config, params)
    write_header(folder / "texts", base=key, vocab_size=280, facts={})
    write_shard(folder / "texts", 0, texts, [2] * len(texts))
    cached_states(
        folder / "states",
        open_generations(folder / "texts"),
        Base(config, params, 256, "float16"),
        key,
        include_prompts=True,
    )
    return folder / "states"


@pytest.mark.parametrize("kind", ["markov", "recurrent", "hydra"])
def test_cached_states_give_the_sums_of_the_texts_themselves(kind, base, states):
    config, params = base
    settings = RefinerSettings(kind, batch_size=13)
    source = open_source(states, settings, config, params)
    refiner_config = settings.config_for(config)
    shapes = jax.eval_shape(lambda: init_refiner(refiner_config, jax.random.key(0)))
    rng = np.random.default_rng(5)
    refiner = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.1, x.shape)), shapes)

    cached = open_states(states, fingerprint(config, params)).positions
    measured = split_texts(cached, 0.02, 10_000, seed=0)[1]
    texts = open_generations(states.parent / "texts")
    rows = np.unique(cached.rows[measured])
    tokens = jnp.asarray(np.stack([texts[row] for row in rows]), jnp.int32)
    ones = jnp.ones_like(tokens)
    places = jnp.broadcast_to(jnp.arange(14), tokens.shape)
    whole = (tokens, ones, places, ones > 0)
    found = evaluate(
        refiner_config, refiner, config, params, source.held_out, source.freeze
    )
    want = evaluate(refiner_config, refiner, config, params, [whole], freeze_rows)
    for name in ("plain_text", "refined_text"):
        mine, theirs = getattr(found, name), getattr(want, name)
        np.testing.assert_array_equal(mine.valid, theirs.valid)
        np.testing.assert_allclose(mine.loss, theirs.loss, rtol=5e-3)
        np.testing.assert_allclose(mine.correct, theirs.correct, atol=1)


def test_tokens_outside_the_draft_vocabulary_are_misses(base, states):
    config, params = base
    source = open_source(states, RefinerSettings("markov"), config, params)
    frozen = freeze_states(config, params, source.held_out[0], own=True)
    sums = head_sums(config, params, frozen, frozen.states)
    logits = BlockwiseLM(config).apply(
        {"params": params}, frozen.hidden[:, 0], method="head_logits"
    )
    for level in (1, 2):
        log_probs = jax.nn.log_softmax(logits[:, level])
        target = frozen.targets[level - 1, :, 0]
        found = jnp.take_along_axis(log_probs, target[:, None], 1)[:, 0]
        valid = frozen.valid[level - 1, :, 0]
        known = jnp.isfinite(found) & valid
        assert 0 < known.sum() < valid.sum() == sums.valid[level - 1]
        assert known.sum() == sums.scored[level - 1]
        np.testing.assert_allclose(
            sums.loss[level - 1], -jnp.sum(found, where=known), rtol=1e-4
        )
        right = jnp.sum((log_probs.argmax(1) == target) & known)
        assert int(sums.correct[level - 1]) == int(right)


def test_losses_are_means_over_the_draft_vocabulary():
    sums = LevelSums(*(np.array([x]) for x in (6.0, 1.0, 3.0, 4.0)))
    columns = table(HeldOut(sums, sums, sums, sums))
    assert columns["refined_text_loss"] == [2.0]
    assert columns["refined_text_accuracy"] == [0.25]


def test_steps_report_the_mean_over_the_draft_vocabulary(base, states):
    config, params = base
    settings = RefinerSettings("markov", batch_size=64)
    source = open_source(states, settings, config, params)
    refiner_config = settings.config_for(config)
    refiner = init_refiner(refiner_config, jax.random.key(0))
    batch = next(source.train)
    frozen = freeze_states(config, params, batch, own=False)
    sums = refined_sums(refiner_config, refiner, config, params, frozen)
    optimizer = make_optimizer(OptimizerConfig(1e-3), 10)
    step = make_step(refiner_config, config, optimizer, source.freeze, own=False)
    *_, (loss, accuracy) = step(refiner, optimizer.init(refiner), params, batch)
    np.testing.assert_allclose(loss, np.mean(sums.loss / sums.scored), rtol=1e-5)
    np.testing.assert_allclose(accuracy, np.mean(sums.correct / sums.valid), rtol=1e-5)
    assert (sums.scored < sums.valid).all()


@pytest.mark.parametrize("kind", ["markov", "hydra"])
def test_training_on_states_lowers_the_loss(kind, base, states, tmp_path):
    config, params = base
    settings = RefinerSettings(kind, steps=60, batch_size=256)
    report = train_refiner(settings, config, params, states, tmp_path / "refiner")
    columns = table(report.held_out)
    for plain, refined in zip(
        columns["plain_text_loss"], columns["refined_text_loss"], strict=True
    ):
        assert refined < plain - 0.1
    assert load_refiner(tmp_path / "refiner").config.vocab_size == 280


def test_states_of_another_model_are_refused(base, states, tmp_path):
    config, params = base
    trunk = {**params["trunk"], "embedding": params["trunk"]["embedding"] + 1}
    other = {**params, "trunk": trunk}
    with pytest.raises(UserError, match="holds states of base"):
        open_source(states, RefinerSettings("markov"), config, other)
    settings = dataclasses.replace(RefinerSettings("markov"), steps=1)
    with pytest.raises(UserError, match="holds states of base"):
        train_refiner(settings, config, other, states, tmp_path / "refiner")
