"""Stacked layers; mixtures of experts against loops over experts, and on a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.models import layers
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.layers import Experts, is_stacked, stack_layers, unstack_layers
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.model import Model
from bpd_jax.models.model_flops import trunk_weights
from bpd_jax.models.parameters import abstract_parameters, init_boxed, parameter_shapes
from bpd_jax.models.partitioning import unbox
from bpd_jax.models.segment_attention import Segments
from bpd_jax.models.transformer_config import ComputeConfig, TransformerConfig
from tests.decoding.random_models import LLAMA, random_params, sharded_model

OPTIONS = {"query_key_norm": True, "use_bias": True, "tied_softmax": False}
MODEL = BlockwiseConfig(TransformerConfig(24, 2, 16, 24, 4, 2, **{**LLAMA, **OPTIONS}))
STACKED = ComputeConfig(scan_layers=True)


@functools.cache
def initial(compute):
    init = jax.jit(lambda key: unbox(init_boxed(MODEL, key, compute)))
    return init(jax.random.key(0))


def test_initial_values_do_not_depend_on_stacking():
    plain, stacked = initial(ComputeConfig())["trunk"], initial(STACKED)["trunk"]
    assert is_stacked(stacked)
    assert not is_stacked(plain)
    assert stacked["layers"]["attention"]["query"]["kernel"].shape == (2, 16, 4, 4)
    assert set(stacked["layers"]) == {"attention_norm", "attention", "mlp_norm", "mlp"}
    assert set(stacked) == {"embedding", "softmax", "final_norm", "layers"}
    unstacked = unstack_layers(stacked)
    jax.tree.map(np.testing.assert_array_equal, unstacked, plain)
    jax.tree.map(np.testing.assert_array_equal, stack_layers(unstacked, 2), stacked)


@pytest.mark.parametrize(
    "remat", [pytest.param("none", marks=pytest.mark.exhaustive), "dots", "full"]
)
@pytest.mark.parametrize(
    "scan", [pytest.param(False, marks=pytest.mark.exhaustive), True]
)
def test_scan_and_rematerialisation_change_nothing(scan, remat):
    params = initial(ComputeConfig())
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 24)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    segments = Segments(jnp.array([[1] * 4 + [2] * 5, [1] * 6 + [0] * 3]))

    def loss(params, compute):
        if compute.scan_layers:
            params = {**params, "trunk": stack_layers(params["trunk"], 2)}
        lm = BlockwiseLM(MODEL, compute)
        hidden, new, _ = lm.apply({"params": params}, tokens, positions, segments)
        return (hidden**2).sum() + (hidden[..., 0] ** 3).sum(), new

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (want, new), gradients = run(params, ComputeConfig())
    compute = ComputeConfig(remat=remat, scan_layers=scan)
    (got, other_new), other_gradients = run(params, compute)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert_close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(functools.partial(assert_close, rtol=1e-4), other_new, new)
    jax.tree.map(functools.partial(assert_close, rtol=1e-3), other_gradients, gradients)


@pytest.mark.parametrize("scan", [False, True])
def test_rematerialisation_reduces_residuals(scan):
    """Residuals between forward and backward pass, counted in numbers."""
    tokens = jnp.zeros((4, 16), jnp.int32)
    segments = Segments(jnp.ones((4, 16), jnp.int32))
    num_residuals = {}
    for remat in ("none", "dots", "full"):
        compute = ComputeConfig(remat=remat, scan_layers=scan)
        lm = BlockwiseLM(MODEL, compute)

        def loss(params, lm=lm):
            return lm.apply({"params": params}, tokens, tokens, segments)[0].sum()

        shapes = abstract_parameters(MODEL, None, compute)
        _, vjp = jax.eval_shape(lambda p, f=loss: jax.vjp(f, p), shapes)
        num_residuals[remat] = sum(leaf.size for leaf in jax.tree.leaves(vjp))
    assert num_residuals["full"] < num_residuals["dots"] < num_residuals["none"]


CONFIG = TransformerConfig(13, 1, 8, 6, 2, experts=5, chosen_experts=2, **LLAMA)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_outputs_are_weighted_sums_of_the_chosen_experts(
    on_cpu, normalised, monkeypatch
):
    monkeypatch.setattr(layers, "on_cpu", lambda: on_cpu)
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
    loaded = LanguageModel("m", None, Model(model, params), None, end_tokens=(0,))
    with pytest.raises(UserError, match="int8 does not round experts"):
        loaded.for_decoding(rounds=True)
