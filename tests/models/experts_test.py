"""Mixtures of experts: against loops over tokens and experts, and on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.loaded_model import LoadedModel
from bpd_jax.models import cpu
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.layers import Experts
from bpd_jax.models.model import Model
from bpd_jax.models.model_flops import trunk_weights
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import random_params, sharded_model

CONFIG = TransformerConfig(
    13,
    1,
    8,
    6,
    2,
    activation="silu",
    gated=True,
    use_bias=False,
    experts=5,
    chosen_experts=2,
    norm="rms",
    rotary=RotaryConfig(),
)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_outputs_are_weighted_sums_of_the_chosen_experts(
    on_cpu, normalised, monkeypatch
):
    monkeypatch.setattr(cpu, "on_cpu", lambda: on_cpu)
    config = dataclasses.replace(CONFIG, normalised_experts=normalised)
    shapes = parameter_shapes(BlockwiseConfig(config))["trunk"]["mlp_0"]
    params = random_params(shapes, 0.5, 0)
    x = np.random.default_rng(1).normal(0, 1, (2, 7, 8)).astype(np.float32)
    found = jax.jit(Experts(config).apply)({"params": params}, x)
    for row, token in np.ndindex(2, 7):
        state = x[row, token]
        shares = jax.nn.softmax(state @ params["router"]["kernel"])
        expected, best = np.zeros(8), np.argsort(-shares)[:2]
        for expert in best:
            gate = jax.nn.silu(state @ params["input_experts"][expert])
            inner = gate * (state @ params["gate_experts"][expert])
            expected += shares[expert] * (inner @ params["output_experts"][expert])
        if normalised:
            expected /= shares[best].sum()
        np.testing.assert_allclose(found[row, token], expected, rtol=1e-4, atol=1e-5)


def test_a_mesh_gives_the_same_states():
    model = BlockwiseConfig(CONFIG)
    alone = Model(model, random_params(parameter_shapes(model), 0.5, 0))
    spread = sharded_model(alone, make_mesh(MeshConfig(data=2, fsdp=2, model=2)))
    tokens = jnp.arange(12).reshape(4, 3)
    positions = jnp.broadcast_to(jnp.arange(3), (4, 3))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((3, 3), bool)), (4, 3, 3))
    run = jax.jit(lambda model: model.forward(tokens, positions, mask)[0])
    np.testing.assert_allclose(run(spread), run(alone), rtol=1e-4, atol=1e-5)


def test_flops_are_those_of_the_chosen_experts():
    attention, router, expert = 4 * 8 * 8, 8 * 5, 3 * 8 * 6
    assert trunk_weights(BlockwiseConfig(CONFIG)) == attention + router + 2 * expert


def test_experts_are_not_rounded():
    model = BlockwiseConfig(CONFIG)
    params = random_params(parameter_shapes(model), 0.5, 0)
    loaded = LoadedModel("m", None, Model(model, params), None, end_tokens=(0,))
    with pytest.raises(UserError, match="int8 does not round experts"):
        loaded.rounded()
