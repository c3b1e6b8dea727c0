"""Passes by kernels: a loop computes what layers in turn do, trees what tokens do."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.cpu.attention_kernel import cache_dtype
from bpd_jax.cpu.cpu_ops import CpuOps
from bpd_jax.cpu.device import kernels_of
from bpd_jax.cpu.layer_loop import has_kernels
from bpd_jax.cpu.layout import decoding_layout, integer_layout
from bpd_jax.models import device_ops
from bpd_jax.models.attention import near
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.cache import KeyValues, commit
from bpd_jax.models.device_ops import Operations
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import parameter_shapes
from bpd_jax.models.quantized import rounded
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import LLAMA, random_params

TRUNK = TransformerConfig(24, 3, 64, 96, 4, 2, head_dim=32, qkv_bias=True, **LLAMA)

pytestmark = pytest.mark.usefixtures("instructions")


def model_of(trunk, precision):
    """A model in the layout for decoding."""
    model = Model(
        BlockwiseConfig(trunk),
        random_params(parameter_shapes(BlockwiseConfig(trunk)), 0.3, 0),
    )
    params = model.params["trunk"]
    if precision != "float32":
        params = rounded(params)[0]
    dtype = None
    if precision == "int8":
        params = integer_layout(params)
        dtype = cache_dtype(precision, trunk.head_width)
    else:
        params = decoding_layout(params, "float32")
    return Model(model.config, {**model.params, "trunk": params}, dtype)


def passes(model):
    """A pass over four tokens, then one over three drafts, of which two are a chain."""
    tokens = jnp.array([[3, 1, 4, 1], [5, 9, 2, 6]])
    positions = jnp.arange(4)[None].repeat(2, 0)
    triangle = jnp.tril(jnp.ones((2, 4, 4), bool))
    cache = model.empty_cache(2, 16)
    _, new, _ = model.forward(tokens, positions, triangle, cache)
    cache = commit(cache, new, jnp.array([4, 3]))
    drafts = jnp.array([[7, 8, 9], [1, 2, 3]])
    mask = jnp.array([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]] * 2)
    earlier = KeyValues(new.keys[:, :, :1], new.values[:, :, :1])
    return model.forward(
        drafts,
        cache.lengths[:, None] + jnp.array([1, 2, 1]),
        mask[:, 1:].astype(bool),
        cache,
        earlier,
        layers=(0, 2),
    )


@pytest.mark.parametrize("precision", ["float32", "stored", "int8"])
def test_same_numbers_in_a_loop(precision, monkeypatch):
    model = model_of(TRUNK, precision)
    looped = jax.jit(passes)(model)
    text = jax.jit(passes).lower(model).as_text()
    monkeypatch.setattr(CpuOps, "for_one_loop", lambda *arguments: None)
    jax.clear_caches()
    in_turn = jax.jit(passes)(model)
    unrolled = jax.jit(passes).lower(model).as_text()
    for one, other in zip(*map(jax.tree.leaves, (looped, in_turn)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert "stablehlo.while" in text
    # A kept program registers them before it is loaded.
    assert kernels_of(text) == sorted(set(re.findall(r"bpd_jax_[^\"\s(]+", text)))
    assert "stablehlo.while" not in unrolled


OTHER = {
    "activation": "gelu",
    "rotary": LLAMA["rotary"],
    "query_key_norm": True,
    "window": 7,
    "attention_softcap": 4.0,
    "residual_scale": 0.7,
}


@pytest.mark.parametrize(
    "precision, trunk",
    [
        ("float32", TRUNK),
        ("stored", TRUNK),
        ("int8", TRUNK),
        ("float32", TransformerConfig(24, 2, 64, 96, 4, 2, head_dim=32, **OTHER)),
    ],
    ids=["float32", "stored", "int8", "windows"],
)
def test_a_pass_has_the_bits_of_single_tokens(precision, trunk):
    """However many tokens a draft has, decoding computes the same numbers."""
    model = model_of(trunk, precision)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 24, (1, 40)))

    @jax.jit
    def run(model, tokens, cache):
        count = tokens.shape[1]
        positions = cache.lengths[:, None] + jnp.arange(count)
        mask = jnp.tril(jnp.ones((1, count, count), bool))
        if trunk.window is not None:
            mask &= near(positions, positions, trunk.window)
        hidden, new, _ = model.forward(tokens, positions, mask, cache)
        return model.next_token_logits(hidden), commit(cache, new, jnp.array([count]))

    _, start = run(model, tokens[:, :19], model.empty_cache(1, 64))
    together, _ = run(model, tokens[:, 19:], start)
    alone, cache = [], start
    for token in range(19, 40):
        logits, cache = run(model, tokens[:, token : token + 1], cache)
        alone.append(logits)
    np.testing.assert_array_equal(jnp.concatenate(alone, 1), together)


@pytest.mark.parametrize(
    "sizes",
    [{"d_ff": 100}, {"d_model": 40}, {"query_key_norm": True, "head_dim": 8}],
    ids=str,
)
def test_sizes_that_are_no_whole_vectors(sizes):
    trunk = dataclasses.replace(TRUNK, param_dtype="bfloat16", **sizes)
    model = model_of(trunk, "float32")
    plain = dataclasses.replace(
        model, params=random_params(parameter_shapes(model.config), 0.3, 0)
    )
    for got, want in zip(
        *(jax.tree.leaves(passes(each)) for each in (model, plain)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_other_devices_call_no_kernel_of_a_cpu(monkeypatch):
    kernel = model_of(TRUNK, "stored").params["trunk"]["mlp_0"]["input"]["kernel"]
    assert type(device_ops.current().operations(kernel, "float32")) is not Operations
    monkeypatch.setattr(device_ops, "_compiled_for", ["tpu"])
    assert type(device_ops.current().operations(kernel, "float32")) is Operations


def test_layers_that_differ_run_in_turn():
    trunk = model_of(TRUNK, "stored").params["trunk"]
    layers = [
        {part: trunk[f"{part}_{layer}"] for part in ("mlp", "attention")}
        for layer in range(3)
    ]
    assert has_kernels(layers, None)
    kernel = layers[1]["mlp"]["input"]["kernel"]
    storage = dataclasses.replace(kernel.rows.storage, minima=True)
    rows = dataclasses.replace(kernel.rows, storage=storage)
    layers[1]["mlp"]["input"]["kernel"] = dataclasses.replace(kernel, rows=rows)
    assert not has_kernels(layers, None)
    assert has_kernels(layers[::2], None)
