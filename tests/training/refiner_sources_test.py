"""Refiners on cached states, for heads with a draft vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.generations import open_generations, write_header, write_shard
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.training.frozen import measure
from bpd_jax.training.heads.frozen_states import FrozenModel
from bpd_jax.training.heads.positions import split_texts
from bpd_jax.training.heads.states_cache import cached_states, open_states
from bpd_jax.training.refiner_sources import (
    default_data,
    open_source,
    outputs_of_rows,
)
from bpd_jax.training.refiners import RefinerObjective
from tests.decoding.random_models import random_heads, random_params
from tests.training.refiners_test import settings

VOCABULARY = np.arange(0, 60, 2, dtype=np.int32)


def test_the_default_data_are_rows_or_else_states(tmp_path):
    with pytest.raises(UserError, match=r"neither packed rows in .*data nor cached"):
        default_data(tmp_path)
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "states.json").write_text("{}")
    assert default_data(tmp_path) == tmp_path / "states"
    (tmp_path / "data").mkdir()
    assert default_data(tmp_path) == tmp_path / "data"


@pytest.fixture(scope="module")
def base(model, params):
    """The tiny model with heads; their draft vocabulary: the even ones of 60 tokens."""
    heads = BlockHeadsConfig(3, 8, draft_vocabulary=len(VOCABULARY))
    trunk = BlockwiseConfig(model.trunk)
    head_params = random_heads(trunk, params, heads, VOCABULARY)
    return BlockwiseConfig(model.trunk, heads), {
        "trunk": params["trunk"],
        "heads": head_params,
    }


@pytest.fixture(scope="module")
def states(tmp_path_factory, base):
    """The folder of states of texts whose tokens have two possible successors."""
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
    write_shard(folder / "texts", 0, texts, [1] * len(texts))
    cached_states(
        folder / "states",
        open_generations(folder / "texts"),
        FrozenModel(config, params, 256, "float16"),
        key,
        include_prompts=True,
    )
    return folder / "states"


def test_sums_of_cached_states_equal_those_of_the_texts(base, states):
    config, params = base
    source = open_source(states, settings(batch_size=13), config, params)
    refiner_config = settings().config_for(config)
    shapes = jax.eval_shape(lambda: refiner_config.init(jax.random.key(0)))
    refiner = random_params(shapes, 0.1, 5)

    cached = open_states(states, fingerprint(config, params)).positions
    measured = split_texts(cached, 0.02, 10_000, seed=0)[1]
    texts = open_generations(states.parent / "texts")
    rows = np.unique(cached.rows[measured])
    tokens = jnp.asarray(np.stack([texts[row] for row in rows]), jnp.int32)
    ones = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(14), tokens.shape)
    text_batch = (tokens, ones, positions, ones > 0)
    state_sums, text_sums = (
        measure(
            RefinerObjective(refiner_config, config, freeze, model_targets=False),
            refiner,
            frozen=params,
            batches=batches,
        )
        for freeze, batches in (
            (source.freeze, source.held_out),
            (outputs_of_rows, [text_batch]),
        )
    )
    for name in ("plain_text", "refined_text"):
        actual, expected = getattr(state_sums, name), getattr(text_sums, name)
        np.testing.assert_array_equal(actual.valid, expected.valid)
        np.testing.assert_allclose(actual.loss, expected.loss, rtol=5e-3)
        np.testing.assert_allclose(actual.correct, expected.correct, atol=1)


@pytest.mark.parametrize("own_softmax", [True, False])
def test_loss_and_gradients_equal_those_of_the_held_out_sums(own_softmax, base, states):
    """The mean over targets in the draft vocabulary, then over levels."""
    config, params = base
    if own_softmax:
        heads = dataclasses.replace(config.heads, own_softmax=True)
        shared = params["heads"]["softmax"]
        softmax = jnp.stack([shared, 0.5 * shared])
        config = dataclasses.replace(config, heads=heads)
        params = {**params, "heads": {**params["heads"], "softmax": softmax}}
    source = open_source(states, settings(batch_size=64), config, params)
    batch = next(source.train(0))
    refiner_config = settings().config_for(config)
    objective = RefinerObjective(refiner_config, config, source.freeze, True)
    shapes = jax.eval_shape(lambda: objective.config.init(jax.random.key(0)))
    refiner = random_params(shapes, 0.1, 5)

    def plain(refiner):
        sums = objective.held_out_sums(refiner, params, batch).refined_text
        return jnp.mean(sums.loss / sums.scored), sums

    (want, sums), gradients = jax.jit(jax.value_and_grad(plain, has_aux=True))(refiner)
    (loss, actual_sums), actual_gradients = jax.jit(
        jax.value_and_grad(objective.loss, has_aux=True)
    )(refiner, params, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(actual_sums.loss, sums.loss, rtol=1e-5)
    np.testing.assert_array_equal(actual_sums.correct, sums.correct)
    assert (actual_sums.scored < actual_sums.valid).all()
    for actual, expected in zip(
        jax.tree.leaves(actual_gradients), jax.tree.leaves(gradients), strict=True
    ):
        assert float(jnp.abs(expected).max()) > 0
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-6)
