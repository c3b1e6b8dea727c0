import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from bpd_jax.data.rows import make_batch
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.transformer_config import ComputeConfig
from bpd_jax.training.drafter_blocks import draw_positions
from bpd_jax.training.loss import BlockwiseLoss, LossSettings, head_targets
from tests.training.runs import assert_close, with_trunk

LAMBDAS = (1.0, 0.5, 2.0)

targets_of = jax.jit(head_targets, static_argnums=3)


@functools.partial(jax.jit, static_argnums=0)
def all_logits(model, params, batch):
    return BlockwiseLM(model).apply(
        {"params": params},
        jnp.asarray(batch.tokens),
        jnp.asarray(batch.positions),
        causal_mask(jnp.asarray(batch.segment_ids)),
        method="all_logits",
    )


def naive_loss(model, params, batch, lambdas, drawn, settings):
    """All logits at once, and loops over every row, position and head.

    `drawn[row]` are the positions of heads 2 to L; None stands for all.
    """
    logits = all_logits(model, params, batch)
    predictions = logits[:, :, 0].argmax(-1)
    log_probs = jax.nn.log_softmax(logits)
    losses, correct = [], []
    rows, length = batch.tokens.shape
    for head in range(1, model.block_size + 1):
        positions = [
            (row, i)
            for row in range(rows)
            for i in range(length - head)
            if batch.segment_ids[row, i] != 0
            and batch.segment_ids[row, i] == batch.segment_ids[row, i + head]
            and (head == 1 or drawn is None or i in drawn[row])
        ]
        row, i = np.array(positions).T
        targets = batch.tokens[row, i + head]
        if head > 1 and settings.head_targets == "model":
            # Head 2 at position i learns what head 1 predicts after token i + 1.
            targets = predictions[row, i + head - 1]
        losses.append(-log_probs[row, i, head - 1, targets].mean())
        correct.append((logits[row, i, head - 1].argmax(-1) == targets).sum())
    total = sum(w * loss for w, loss in zip(lambdas, losses, strict=True))
    return total, (jnp.stack(losses), jnp.stack(correct))


@functools.cache
def differentiate(model, step=0, **options):
    """A jitted function of parameters, rows and λ: ((loss, sums), gradients)."""

    def loss(params, rows, lambdas):
        return BlockwiseLoss(model, **options)(params, rows, lambdas, step)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize(
    "options, chunk, settings",
    [
        ({"first_has_ffn": True}, 5, LossSettings(positions_per_row=7)),
        ({"residual": False, "activation": "gelu"}, 5, LossSettings("model")),
        ({"heads": None}, None, LossSettings(positions_per_row=7)),
    ],
    ids=["drawn_first", "own", "no_heads"],
)
def test_equals_the_naive_loss_and_its_gradients(
    options, chunk, settings, make_model, make_parameters, batch, one_device
):
    """Head 1, which defines the targets `model`, gets no gradient from them."""
    model = make_model(**options)
    params = make_parameters(model, one_device)
    lambdas = LAMBDAS[: model.block_size]
    drawn = None
    if settings.positions_per_row is not None:
        drawn = np.asarray(draw_positions(batch, settings.positions_per_row, 3))
    (expected, (losses, correct)), expected_gradients = jax.jit(
        jax.value_and_grad(
            lambda p: naive_loss(model, p, batch, lambdas, drawn, settings),
            has_aux=True,
        )
    )(params)
    differentiated = differentiate(
        model,
        compute=ComputeConfig(loss_chunk=chunk),
        settings=settings,
        step=3,
    )
    (loss, sums), gradients = differentiated(params, batch, lambdas)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(sums.loss / sums.valid, losses, rtol=1e-5)
    np.testing.assert_array_equal(sums.correct, correct)
    assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-6)


def test_gradient_is_scaled_by_the_outer_function(model, params, batch):
    def loss(p, factor):
        return factor * BlockwiseLoss(model)(p, batch, LAMBDAS)[0]

    gradient = jax.jit(jax.grad(loss))
    once, thrice = (jax.device_get(gradient(params, factor)) for factor in (1.0, 3.0))
    assert_close(jax.tree.map(lambda x: 3 * x, once), thrice, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "loss_mask, valid",
    [
        ([1, 1, 1, 1], [[1, 1, 1, 0], [1, 1, 0, 0]]),  # They do not wrap around.
        ([0, 0, 1, 1], [[0, 1, 1, 0], [1, 1, 0, 0]]),  # Contexts are not masked.
    ],
)
def test_targets_of_a_full_row(loss_mask, valid):
    tokens, mask = np.array([[5, 6, 7, 8]]), np.array([loss_mask], bool)
    _, found = targets_of(tokens, np.ones((1, 4), int), mask, 2)
    np.testing.assert_array_equal(found[:, 0], valid)


def test_batch_without_targets_has_zero_loss(model, params):
    rows = make_batch(np.ones((1, 4)), np.array([[1, 2, 3, 0]]))
    (loss, _), gradients = differentiate(model)(params, rows, LAMBDAS)
    assert loss == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_evaluation_equals_training_and_adds_entropies(model, params, batch):
    """Evaluation uses all positions, also where training draws some of them."""
    compute, settings = ComputeConfig(loss_chunk=5), LossSettings(positions_per_row=4)
    (_, sums), _ = differentiate(model)(params, batch, LAMBDAS)
    evaluate = jax.jit(BlockwiseLoss(model, compute, settings).evaluation_sums)
    evaluation = evaluate(params, batch)
    for name in ("loss", "correct", "valid"):
        np.testing.assert_allclose(
            getattr(evaluation, name), getattr(sums, name), rtol=1e-5, err_msg=name
        )
    probs = scipy.special.softmax(all_logits(model, params, batch), -1)
    entropies = -(probs * np.log(probs)).sum(-1)
    tokens, segment_ids, _, loss_mask = batch
    _, valid = targets_of(tokens, segment_ids, loss_mask, 3)
    want = (np.moveaxis(entropies, -1, 0) * valid).sum((1, 2))
    np.testing.assert_allclose(evaluation.entropy, want, rtol=1e-5)


def test_half_precision_model_has_float32_losses_and_gradients(model, params, batch):
    half = with_trunk(model, dtype="bfloat16")
    compute = ComputeConfig(loss_chunk=5)
    (loss, _), gradients = jax.device_get(
        differentiate(half, compute=compute)(params, batch, LAMBDAS)
    )
    (exact, _), expected = jax.device_get(differentiate(model)(params, batch, LAMBDAS))
    assert loss.dtype == np.float32
    np.testing.assert_allclose(loss, exact, rtol=0.03)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {np.dtype("float32")}
    expected, gradients = (
        np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (expected, gradients)
    )
    error = np.linalg.norm(gradients - expected)
    assert error < 0.03 * np.linalg.norm(expected)
