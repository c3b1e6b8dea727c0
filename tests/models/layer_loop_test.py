"""One loop over layers: stacked layers compute what separate ones do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models import decoding_parameters, prefix_attention, quantized_kernel
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.cache import KeyValues, commit, grow
from bpd_jax.models.decoding_parameters import stacked_layers
from bpd_jax.models.layers import is_stacked, stack_layers
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import parameter_shapes
from bpd_jax.models.prefix_attention import in_parts
from bpd_jax.models.quantized import QuantizedMatrix, in_kernel, rounded
from bpd_jax.models.quantized_kernel import gpu_product
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.stacks import InStack
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import LLAMA, random_params, sharded_model

TRUNK = TransformerConfig(24, 5, 32, 48, 4, 2, head_dim=16, qkv_bias=True, **LLAMA)
KINDS = {
    "equal": {},
    # A period of two layers, and one layer after two periods.
    "windows": {"window": 3, "windowed_layers": (0, 2, 4)},
    # Three equal layers, then two.
    "positions": {"unrotated_layers": (3, 4)},
    "experts": {"experts": 3, "chosen_experts": 2},
}


@functools.cache
def separate(kind):
    changes = KINDS[kind]
    if kind == "windows":
        changes = {**changes, "window_rotary": RotaryConfig(base=100.0)}
    config = BlockwiseConfig(dataclasses.replace(TRUNK, **changes))
    return Model(config, random_params(parameter_shapes(config), 0.3, 0))


def with_trunk(model, trunk):
    return model.with_params({**model.params, "trunk": trunk})


@jax.jit
def passes(model):
    """A pass over four tokens, then one over three drafts after an earlier one."""
    tokens = jnp.array([[3, 1, 4, 1], [5, 9, 2, 6]])
    positions = jnp.arange(4)[None].repeat(2, 0)
    triangle = jnp.tril(jnp.ones((2, 4, 4), bool))
    cache = model.empty_cache(2, 16)
    _, new, _ = model.forward(tokens, positions, triangle, cache)
    cache = grow(commit(cache, new, jnp.array([4, 3])), 8)
    mask = jnp.array([[[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]] * 2).astype(bool)
    earlier = KeyValues(new.keys[:, :, :1], new.values[:, :, :1])
    positions = cache.lengths[:, None] + jnp.array([1, 2, 1])
    drafts = jnp.array([[7, 8, 9], [1, 2, 3]])
    return model.forward(drafts, positions, mask, cache, earlier, layers=(3, 0, 3))


def assert_close(got, want):
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_layers_compute_what_separate_ones_do(kind):
    model = separate(kind)
    stacked = with_trunk(model, stack_layers(model.params["trunk"], 5))
    assert stacked.empty_cache(2, 16).values[0].shape == (2, 5, 2, 16, 16)
    assert_close(passes(stacked), passes(model))
    assert "stablehlo.while" in passes.lower(stacked).as_text()


@pytest.mark.parametrize("kind", ["equal", "windows"])
def test_stacked_layers_are_spread_over_a_mesh(kind):
    model = separate(kind)
    mesh = make_mesh(MeshConfig(fsdp=2, model=2), jax.devices()[:4])
    sharded = sharded_model(model, mesh)
    kernel = sharded.params["trunk"]["layers"]["mlp"]["input"]["kernel"]
    assert kernel.sharding.spec == jax.P(None, "fsdp", "model")
    keys = jax.eval_shape(lambda: sharded.empty_cache(2, 16)).keys[0]
    assert keys.shape == (2, 5, 2, 16, 16)
    assert_close(passes(sharded), passes(model))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Layers are stacked for the kernels of a GPU, which are interpreted."""
    monkeypatch.setattr(decoding_parameters, "has_tensor_cores", lambda device: True)
    monkeypatch.setattr(decoding_parameters, "on_cpu", lambda mesh=None: False)
    monkeypatch.setattr(prefix_attention, "has_tensor_cores", lambda device: True)
    attend = functools.partial(in_parts, interpret=True)
    monkeypatch.setattr(prefix_attention, "in_parts", attend)
    product = functools.partial(gpu_product, interpret=True)
    monkeypatch.setattr(quantized_kernel, "gpu_product", product)
    passes.clear_cache()
    yield
    passes.clear_cache()


@pytest.mark.parametrize("stored", ["arrays", "blocks", "outputs"])
def test_kernels_of_a_gpu_read_stacks(stored, on_a_gpu):
    model = separate("equal")
    if stored != "arrays":
        by_output = stored == "outputs"
        trunk, _ = rounded(model.params["trunk"], by_output=by_output)
        model = with_trunk(model, trunk)
    trunk = in_kernel(model.params["trunk"])
    trunk = {**trunk, "embedding": model.params["trunk"]["embedding"]}
    trunk = stacked_layers(trunk, model.config.trunk, None)
    assert is_stacked(trunk)
    stacked = with_trunk(model, trunk)
    text = passes.lower(stacked).as_text()
    assert "stablehlo.while" in text
    assert_close(passes(stacked), passes(model))


def test_layers_that_are_stored_differently_stay_separate(on_a_gpu):
    trunk, _ = rounded(separate("equal").params["trunk"])
    trunk["mlp_2"] = separate("equal").params["trunk"]["mlp_2"]
    assert stacked_layers(trunk, TRUNK, None) is trunk


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_products_of_one_and_of_many_rows_with_a_stack(dtype):
    """Interpreted: sizes that are no tiles, several parts and tiles of rows."""
    rng = np.random.default_rng(0)
    stack = jnp.asarray(rng.normal(size=(3, 40, 1160)) * 9, dtype)
    matrix = stack[1].astype(jnp.float32)
    if dtype == "int8":
        scales = jnp.asarray(rng.uniform(size=(3, 40, 1)), jnp.float32)
        stack, matrix = QuantizedMatrix(stack, scales), matrix * scales[1]
    x = jnp.asarray(rng.normal(size=(70, 1160)), jnp.float32)
    run = functools.partial(gpu_product, interpret=True)
    got = run(x, InStack(stack, jnp.int32(1)))
    np.testing.assert_allclose(got, x @ matrix.T, rtol=1e-4, atol=2e-2)
    one = run(x[3:4], InStack(stack, jnp.int32(1)))
    np.testing.assert_allclose(one, got[3:4], rtol=1e-4, atol=2e-2)
