"""The heads' loss itself: exactness, memory, and layout a mesh splits it."""

import dataclasses
import re

import jax
import jax.extend.core as jax_core
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.data.rows import make_batch
from bpd_jax.models.block_heads import apply_head
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.compute import ComputeConfig
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.training.chunked_loss import heads_loss
from bpd_jax.training.loss import blockwise_loss, evaluation_sums, head_targets
from bpd_jax.training.softmax_chunks import LossLayout
from bpd_jax.training.state import abstract_parameters
from bpd_jax.training.step import put_batch

LAMBDAS = (1.0, 0.5, 2.0)


def plain_loss(model, heads, softmax, hidden, targets, valid, scale):
    """Logits of all heads at once, in the precision of what comes in."""
    states = [] if model.heads is not None and model.heads.first_has_ffn else [hidden]
    if heads is not None:
        for layer in range(model.heads.num_ffns):
            weights = jax.tree.map(lambda x, layer=layer: x[layer], heads)
            dtype = hidden.dtype
            states.append(apply_head(model.heads, weights, hidden, dtype=dtype))
    log_probs = jax.nn.log_softmax(jnp.stack(states) @ softmax.T)
    losses = -jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
    return jnp.dot(scale, jnp.where(valid, losses, 0).sum((1, 2)))


@pytest.mark.parametrize(
    "options, chunk",
    [
        ({}, None),
        ({}, 5),
        pytest.param({}, 3, marks=pytest.mark.exhaustive),
        ({"first_has_ffn": True}, 5),
        ({"heads": None}, 5),
    ],
)
def test_gradients_equal_those_of_the_plain_loss_in_float64(
    options, chunk, make_model, make_parameters, batch, one_device
):
    """Chunks of 5 of 12 positions: two whole ones, and one that is filled up."""
    model = make_model(**options)
    params = jax.device_get(make_parameters(model, one_device))
    hidden = np.random.default_rng(2).normal(size=(8, 12, 16)).astype(np.float32)
    given = (params.get("heads"), params["trunk"]["embedding"], hidden)
    targets, valid = jax.device_get(
        head_targets(
            *(jnp.asarray(x) for x in (batch.tokens, batch.segment_ids)),
            jnp.asarray(batch.loss_mask),
            model.block_size,
        )
    )
    scale = np.array(LAMBDAS[: model.block_size]) / valid.sum((1, 2))

    def fused(given):
        layout, weights = LossLayout(model, chunk), jnp.asarray(scale, jnp.float32)
        return heads_loss(layout, *given, targets, valid, weights)[0]

    def plain(given):
        return plain_loss(model, *given, targets, valid, scale)

    loss, got = jax.device_get(jax.jit(jax.value_and_grad(fused))(given))
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: x.astype(np.float64), given)
        expected, want = jax.device_get(jax.jit(jax.value_and_grad(plain))(exact))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, b.dtype) == (np.float32, np.float64)
        assert np.abs(a - b).max() < 1e-6 * np.abs(b).max()
        assert np.linalg.norm(a - b) < 1e-6 * np.linalg.norm(b)


def test_nine_heads_need_little_more_memory_than_one():
    """Compiled, not run: the temporaries of the loss with its gradient."""
    rows = make_batch(np.ones((8, 64)), np.ones((8, 64)))
    trunk = TransformerConfig(5003, 1, 32, 64, 2, max_length=64)

    def temporaries(heads):
        model = BlockwiseConfig(trunk, heads)
        lambdas = (1.0,) * model.block_size
        compute = ComputeConfig(loss_chunk=16)

        def loss(params):
            return blockwise_loss(model, params, rows, lambdas, compute)[0]

        program = jax.jit(jax.value_and_grad(loss)).lower(parameter_shapes(model))
        return program.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(BlockHeadsConfig(9, hidden=64)) < 1.5 * temporaries(None)


def arrays(jaxpr):
    """Every array that a program computes, in its loops and branches too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jax_core.jaxprs_in_params(equation.params):
            yield from arrays(inner)


@pytest.mark.parametrize("chunk", [None, 5])
def test_one_chunk_of_one_head_is_all_the_logits_there_are(chunk, model, params, batch):
    compute = ComputeConfig(loss_chunk=chunk)
    rows, length = batch.tokens.shape
    gradient = jax.grad(lambda p: blockwise_loss(model, p, batch, LAMBDAS, compute)[0])
    jaxpr = jax.make_jaxpr(gradient)(params)
    vocab, width = model.trunk.vocab_size, model.trunk.d_model
    of_vocab = {a.shape for a in arrays(jaxpr.jaxpr) if vocab in a.shape}
    logits = (rows * (chunk or length), vocab)
    assert logits in of_vocab
    # Besides them: the comparison with the targets, and the softmax and its gradient.
    small = {s for s in of_vocab if np.prod(s) <= vocab * width}
    assert of_vocab - small == {logits}
    # The logits are not computed again: the softmax appears once per place of a head.
    assert str(jaxpr).count("log ") == 2


def with_vocabulary(model, size):
    trunk = dataclasses.replace(model.trunk, vocab_size=size)
    return dataclasses.replace(model, trunk=trunk)


@pytest.mark.parametrize("size", [280, 281], ids=["even", "odd"])
def test_no_device_holds_logits_of_the_whole_vocabulary(size, model, batch):
    model = with_vocabulary(model, size)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    compute = ComputeConfig(loss_chunk=6)

    def loss(params, rows):
        return blockwise_loss(model, params, rows, LAMBDAS, compute, mesh=mesh)[0]

    program = jax.jit(jax.grad(loss)).lower(
        abstract_parameters(model, mesh), put_batch(batch, mesh)
    )
    text = program.compile().as_text()
    half = -(-size // 2)
    assert f"f32[1,12,{half}]" in text
    whole = rf"f32\[[\d,]*\b({size}|{2 * half})\]"
    assert not re.findall(whole, text)
    # The gradient of the softmax crosses the links once, not once per head and chunk.
    reductions = [
        line
        for line in text.splitlines()
        if re.search(r" (all-reduce|reduce-scatter)\(", line)
        and re.search(rf"f32\[(1,)?{half},\d+\]", line.split("=")[1])
    ]
    assert len(reductions) <= 2


def test_a_vocabulary_that_the_mesh_does_not_divide_is_filled_up(
    model, make_parameters, batch, one_device
):
    """Loss, gradients and entropies of 281 tokens on two devices are those on one."""
    model = with_vocabulary(model, 281)
    params = make_parameters(model, one_device)
    params = jax.device_get(params)

    def found(mesh):
        def loss(params, rows):
            return blockwise_loss(model, params, rows, LAMBDAS, compute, mesh=mesh)

        def sums(params, rows):
            return evaluation_sums(model, params, rows, compute, mesh=mesh)

        compute = ComputeConfig(loss_chunk=5)
        shardings = jax.tree.map(lambda x: x.sharding, abstract_parameters(model, mesh))
        given = (jax.device_put(params, shardings), put_batch(batch, mesh))
        both = jax.jit(jax.value_and_grad(loss, has_aux=True))(*given)
        return jax.device_get((both, jax.jit(sums)(*given)))

    split = found(make_mesh(MeshConfig(data=2, fsdp=2, model=2)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        split,
        found(one_device),
    )
