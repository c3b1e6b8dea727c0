"""The loss of the heads: exactness, memory, and sharding over a mesh."""

import re

import jax
import jax.extend.core as jax_core
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.models.block_heads import apply_head
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.parameters import abstract_parameters
from bpd_jax.models.partitioning import from_own_rows
from bpd_jax.models.transformer_config import ComputeConfig
from bpd_jax.training.cross_entropy import Head
from bpd_jax.training.loss import BlockwiseLoss, head_targets
from tests.training.runs import assert_close, with_trunk

LAMBDAS = (1.0, 0.5, 2.0)


def plain_loss(model, layers, softmax, hidden, targets, valid, scale):
    """Logits of all heads at once, in the precision of the inputs."""
    states = [hidden]
    for layer in range(model.heads.num_ffns):
        weights = jax.tree.map(lambda x, layer=layer: x[layer], layers)
        states.append(apply_head(model.heads, weights, hidden, dtype=hidden.dtype))
    log_probs = jax.nn.log_softmax(jnp.stack(states) @ softmax.T)
    losses = -jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
    return jnp.dot(scale, jnp.where(valid, losses, 0).sum((1, 2)))


def test_gradients_equal_those_of_the_plain_loss_in_float64(model, params, batch):
    """Chunks of 5 of 12 positions: two full ones, and one that is padded.

    `loss_test` compares other kinds of heads.
    """
    hidden = np.random.default_rng(2).normal(size=(8, 12, 16)).astype(np.float32)
    inputs = jax.device_get((params["heads"], params["trunk"]["embedding"], hidden))
    fields = map(jnp.asarray, (batch.tokens, batch.segment_ids, batch.loss_mask))
    targets, valid = jax.device_get(head_targets(*fields, model.block_size))
    scale = np.array(LAMBDAS) / valid.sum((1, 2))

    def fused(inputs):
        layers, matrix, hidden = inputs
        heads = Head(layers, targets, valid, None, jnp.asarray(scale, jnp.float32))
        loss = BlockwiseLoss(model, ComputeConfig(loss_chunk=5))
        return loss.heads_loss(matrix, hidden, heads)[0]

    def plain(inputs):
        return plain_loss(model, *inputs, targets, valid, scale)

    loss, gradients = jax.device_get(jax.jit(jax.value_and_grad(fused))(inputs))
    with jax.enable_x64(True):
        float64_inputs = jax.tree.map(lambda x: x.astype(np.float64), inputs)
        expected, expected_gradients = jax.device_get(
            jax.jit(jax.value_and_grad(plain))(float64_inputs)
        )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for a, b in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        assert (a.dtype, b.dtype) == (np.float32, np.float64)
        assert np.abs(a - b).max() < 1e-6 * np.abs(b).max()
        assert np.linalg.norm(a - b) < 1e-6 * np.linalg.norm(b)


def arrays(jaxpr):
    """Every array that a program computes, in its loops and branches too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jax_core.jaxprs_in_params(equation.params):
            yield from arrays(inner)


@pytest.mark.parametrize("chunk", [None, 5])
def test_logits_exist_for_one_chunk_of_one_head_only(chunk, model, params, batch):
    compute = ComputeConfig(loss_chunk=chunk)
    rows, length = batch.tokens.shape
    gradient = jax.grad(lambda p: BlockwiseLoss(model, compute)(p, batch, LAMBDAS)[0])
    jaxpr = jax.make_jaxpr(gradient)(params)
    vocab, width = model.trunk.vocab_size, model.trunk.d_model
    vocab_shapes = {a.shape for a in arrays(jaxpr.jaxpr) if vocab in a.shape}
    logits = (rows * (chunk or length), vocab)
    assert logits in vocab_shapes
    # Besides them: the comparison with the targets, and the softmax and its gradient.
    small_shapes = {s for s in vocab_shapes if np.prod(s) <= vocab * width}
    assert vocab_shapes - small_shapes == {logits}
    # The logits are not recomputed: one softmax for head 1, one in the scan over heads.
    assert str(jaxpr).count("log ") == 2


def test_no_device_holds_logits_of_the_whole_vocabulary(model, batch):
    size = 281
    model = with_trunk(model, vocab_size=size)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    compute = ComputeConfig(loss_chunk=6)

    def loss(params, rows):
        return BlockwiseLoss(model, compute, mesh=mesh)(params, rows, LAMBDAS)[0]

    program = jax.jit(jax.grad(loss)).lower(
        abstract_parameters(model, mesh), from_own_rows(batch, mesh)
    )
    text = program.compile().as_text()
    half = -(-size // 2)
    assert f"f32[1,12,{half}]" in text
    pattern = rf"f32\[[\d,]*\b({size}|{2 * half})\]"
    assert not re.findall(pattern, text)
    # The gradient of the softmax is reduced once, not once per head and chunk.
    reductions = [
        line
        for line in text.splitlines()
        if re.search(r" (all-reduce|reduce-scatter)\(", line)
        and re.search(rf"f32\[(1,)?{half},\d+\]", line.split("=")[1])
    ]
    assert len(reductions) <= 2


def test_vocabulary_is_padded_to_a_multiple_of_the_mesh(
    model, make_parameters, batch, one_device
):
    """Loss, gradients and entropies of 281 tokens on two devices equal those on one."""
    model = with_trunk(model, vocab_size=281)
    params = jax.device_get(make_parameters(model, one_device))

    def results_on(mesh):
        def loss(params, rows):
            return BlockwiseLoss(model, compute, mesh=mesh)(params, rows, LAMBDAS)

        def sums(params, rows):
            return BlockwiseLoss(model, compute, mesh=mesh).evaluation_sums(
                params, rows
            )

        compute = ComputeConfig(loss_chunk=5)
        shardings = jax.tree.map(lambda x: x.sharding, abstract_parameters(model, mesh))
        arguments = (jax.device_put(params, shardings), from_own_rows(batch, mesh))
        loss_and_gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(*arguments)
        return jax.device_get((loss_and_gradients, jax.jit(sums)(*arguments)))

    sharded = results_on(make_mesh(MeshConfig(data=2, fsdp=2, model=2)))
    assert_close(sharded, results_on(one_device), rtol=1e-4, atol=1e-6)
