"""A block drafter that is trained together with its model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bpd_jax
from bpd_jax.base.errors import UserError
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.config_files import load_config
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.partitioning import from_own_rows
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.segment_attention import Segments
from bpd_jax.models.transformer_config import ComputeConfig, TransformerConfig
from bpd_jax.training.drafter_blocks import draw_positions
from bpd_jax.training.loss import BlockwiseLoss, LossSettings
from bpd_jax.training.state import abstract_state, init_state
from bpd_jax.training.step import make_train_step
from bpd_jax.training.trainer import train
from tests.training.runs import assert_close, parameters

TRUNK = TransformerConfig(
    280, 2, 16, 32, 4, max_length=64, rotary=RotaryConfig(100.0), norm="rms"
)
DRAFTER = BlockDrafterConfig((0, 1), block_size=4, num_layers=1, window=4)
SETTINGS = LossSettings(anchors_per_row=5)
LAMBDAS = np.array([1, 0.8, 0.6, 0.4], np.float32)


def model_of(**changes):
    return BlockwiseConfig(TRUNK, drafter=dataclasses.replace(DRAFTER, **changes))


@functools.partial(jax.jit, static_argnums=0)
def block_log_probs(functions, params, context, lengths, anchor, embedding):
    """Log-probabilities `[L-1, V]` of the block after a padded context."""
    cache = functions.prefill(params, context, lengths, 64)
    states = functions.states(params, cache, anchor)[0]
    return jax.nn.log_softmax(states @ embedding.T)


def plain_losses(model, params, batch, step):
    """Mean losses of positions 1 … L-1, one block of one document at a time."""
    functions = DrafterFunctions(model.drafter.resolve(TRUNK), TRUNK)
    segments = Segments(jnp.asarray(batch.segment_ids))
    features = jax.jit(
        lambda params: BlockwiseLM(model).apply(
            {"params": params}, batch.tokens, batch.positions, segments, layers=(0, 1)
        )[2]
    )(params)
    features = np.asarray(features)
    losses = [[] for _ in range(model.drafter.block_size - 1)]
    embedding = np.asarray(params["trunk"]["embedding"])
    for row, drawn in enumerate(draw_positions(batch, 5, step)):
        for last in drawn:
            segment = batch.segment_ids[row]
            document = np.flatnonzero((segment == segment[last]) & (segment > 0))
            if not len(document) or last + 1 not in document:
                continue
            read = document[document <= last]
            # Of one length, so that it is compiled once.
            context = np.zeros_like(features[:1])
            context[0, : len(read)] = features[row, read]
            lengths = np.array([len(read)], np.int32)
            anchor = embedding[batch.tokens[row, last + 1]][None]
            inputs = params["drafter"], context, lengths, anchor, embedding
            log_probs = np.asarray(block_log_probs(functions, *inputs))
            for level, level_losses in enumerate(losses):
                if (target := last + 2 + level) in document:
                    level_losses.append(-log_probs[level, batch.tokens[row, target]])
    return [np.mean(level_losses) for level_losses in losses]


def test_losses_equal_those_of_single_blocks(batch, make_parameters, one_device):
    """Packed documents, windows and padding: blocks attend as they do in decoding."""
    model = model_of(reads_last_token=True)
    params = make_parameters(model, one_device)
    compute = ComputeConfig(loss_chunk=2)
    loss, sums = jax.jit(
        lambda p: BlockwiseLoss(model, compute, SETTINGS)(p, batch, LAMBDAS, 3)
    )(params)
    means = sums.loss / sums.valid
    expected = plain_losses(model, params, batch, 3)
    np.testing.assert_allclose(means[1:], expected, rtol=1e-4)
    np.testing.assert_allclose(loss, means @ LAMBDAS, rtol=1e-5)
    evaluate = jax.jit(BlockwiseLoss(model, settings=SETTINGS).evaluation_sums)
    assert evaluate(params, batch).entropy.shape == (4,)


def test_gradients_reach_trunk_and_drafter(batch, make_parameters, one_device):
    """By finite differences, in a random direction of each part."""
    model = model_of(reads_last_token=True)
    params = make_parameters(model, one_device)
    only_drafter = np.array([0, 1, 1, 1], np.float32)
    loss = jax.jit(
        lambda p: BlockwiseLoss(model, settings=SETTINGS)(p, batch, only_drafter)[0]
    )
    gradient = jax.grad(loss)(params)
    for part in ("trunk", "drafter"):
        leaves, tree = jax.tree.flatten(gradient[part])
        norm = optax.global_norm(leaves)
        assert norm > 0.01
        direction = jax.tree.unflatten(tree, [leaf / norm for leaf in leaves])

        def moved(size, part=part, direction=direction):
            new = jax.tree.map(lambda x, d: x + size * d, params[part], direction)
            return loss({**params, part: new})

        slope = (moved(1e-2) - moved(-1e-2)) / 2e-2
        np.testing.assert_allclose(slope, norm, rtol=0.05)


def test_positions_differ_by_step_and_spread_over_the_row(batch):
    first, second = (np.asarray(draw_positions(batch, 5, step)) for step in (0, 1))
    assert (first != second).any()
    # One position per part of the row; 11 positions have a next token.
    assert (np.diff(first) > 0).all()
    assert first.min() >= 0
    assert first.max() <= 10
    with pytest.raises(UserError, match="anchors_per_row"):
        draw_positions(batch, 12, 0)


def test_a_mesh_and_another_layout_equal_one_device(batch, one_device):
    model, optimizer = model_of(reads_last_token=True), optax.sgd(0.1)
    layout = ComputeConfig(remat="full", scan_layers=True, loss_chunk=2, accumulate=2)
    results = []
    for options, devices in (
        (ComputeConfig(), one_device),
        (layout, make_mesh(MeshConfig(2, 2, 2))),
    ):
        abstract = abstract_state(model, optimizer, devices, options)
        step = make_train_step(
            BlockwiseLoss(model, options, SETTINGS, devices),
            LAMBDAS,
            optimizer,
            abstract,
        )
        state = init_state(model, optimizer, abstract, 0, options)
        for _ in range(2):
            state, metrics = step(state, from_own_rows(batch, devices))
        results.append(jax.device_get((state.params["drafter"], metrics)))
    assert_close(*results, rtol=2e-4, atol=1e-6)


def test_a_trained_run_is_loaded_with_its_drafter(train_config, tmp_path):
    """`accelerator_test` compares the texts of such a run."""
    config = dataclasses.replace(
        train_config, model=model_of(), anchors_per_row=5, steps=1, evaluate_every=1
    )
    metrics = train(config, tmp_path)
    assert np.isfinite([metrics[f"validation_loss_head_{h}"] for h in (1, 4)]).all()
    assert load_config(tmp_path / "model.json") == config.model
    lm = bpd_jax.load(tmp_path)
    found, saved = lm.assets.drafter.params, parameters(tmp_path)["drafter"]
    assert_equal = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    assert_equal(found["final_norm"], saved["final_norm"])
    # The default method of such a run drafts with it.
    assert lm.decoder().default_method.name.startswith("block")
