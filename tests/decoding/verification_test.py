"""Verification of trees and of chains: the same outcome of every serial call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.decoding import verification
from bpd_jax.decoding.decode_loop import (
    Weights,
    decode_on_device,
    prefill,
)
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import BATCHED, TREE, DecodeOptions, StepOptions
from bpd_jax.decoding.verification import chain_states, tree_states
from bpd_jax.drafting.assets import Assets
from bpd_jax.drafting.draft_tree import from_drafts
from bpd_jax.drafting.lattice import Drafts
from bpd_jax.drafting.merging import merge_prefixes
from bpd_jax.models.model import Model
from tests.decoding.random_models import (
    STEPS,
    assert_same,
    make_model,
    make_ngram,
    make_prompts,
)
from tests.drafting.naive import path_to


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("zero_gram:4", marks=pytest.mark.exhaustive),
        pytest.param("zero_gram:6:search=best", marks=pytest.mark.exhaustive),
        "medusa:8",
        "ngram_device:3",
    ],
)
@pytest.mark.parametrize(
    "temperature", [0.0, pytest.param(0.9, marks=pytest.mark.exhaustive)]
)
def test_both_layouts_take_the_same_steps(name, temperature):
    decoder = Decoder(
        make_model(6, num_layers=1), width=3, assets=Assets(ngram=make_ngram())
    )
    options = DecodeOptions(
        max_new_tokens=20, end_of_text=0, batch_size=4, temperature=temperature
    )
    tree, chains = (
        decoder.decode(
            parse_method(name),
            make_prompts([4, 11, 1, 7]),
            dataclasses.replace(options, verification=verification),
        )
        for verification in (TREE, BATCHED)
    )
    assert_same(tree, chains, *STEPS)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The attributes of a drafter that a pass reads."""

    max_depth: int
    max_nodes: int
    max_drafts: int
    feature_layers: tuple[int, ...] = ()


def test_hidden_states_of_nodes_follow_their_prefixes():
    """In both layouts they equal those of a pass over the text and the node's path."""
    model = make_model(7)
    rng = np.random.default_rng(0)
    drafts = rng.integers(0, 3, (2, 5, 4))
    drafts[:, :, 0] = 1
    scores = np.array([[0.0] * 5, [0.0, 0.0, 0.0, -np.inf, -np.inf]])
    tree = from_drafts(Drafts(jnp.asarray(drafts, jnp.int32), jnp.asarray(scores)))
    prompts = jnp.asarray(rng.integers(0, 13, (2, 8)), jnp.int32)
    lengths = jnp.array([5, 8])
    drafter = Decoder(model, width=3).drafter(parse_method("bpd"))
    start = prefill(
        model,
        Weights(drafter.arrays),
        drafter,
        prompts,
        lengths,
        lengths + 4,
        (0, jnp.arange(2)),
        options=StepOptions(),
        max_calls=4,
    )
    merged = merge_prefixes(tree, 20, 4)
    read = jax.jit(Model.forward)
    for states in (tree_states, chain_states):
        run = jax.jit(states, static_argnums=3)
        node_hidden, node_new, _ = run(model, start.cache, merged, Sizes(4, 20, 5))
        for row in range(2):
            valid = np.asarray(merged.valid[row])
            expected = {
                tuple(draft[:n])
                for draft in drafts[row][np.isfinite(scores[row])].tolist()
                for n in range(1, 5)
            }
            paths = []
            for node in np.flatnonzero(valid):
                path = path_to(merged, row, node)
                paths.append(path)
                text = [*prompts[row, : lengths[row]].tolist(), *path]
                padded = np.zeros((1, 12), np.int32)
                padded[0, : len(text)] = text
                mask = jnp.tril(jnp.ones((1, 12, 12), bool))
                hidden, new, _ = read(model, padded, jnp.arange(12)[None], mask)
                last = len(text) - 1
                np.testing.assert_allclose(
                    node_hidden[row, node], hidden[0, last], atol=1e-4
                )
                np.testing.assert_allclose(
                    node_new.keys[:, row, node], new.keys[:, 0, last], atol=1e-4
                )
            # Every prefix once.
            assert sorted(paths) == sorted(expected)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("heads/best:9", 16),
        ("heads/tree:24:min_prob=0.1+lookup:4", 12),
        ("lookup:5", 1),
    ],
)
def test_passes_over_fewer_nodes_change_nothing(monkeypatch, name, size):
    """Passes of several sizes against passes over all nodes."""
    decoder = Decoder(make_model(3), width=3)
    options = DecodeOptions(max_new_tokens=24)
    prompts = make_prompts([4, 11, 7])
    method = parse_method(name)
    fewer = decoder.decode(method, prompts, options)
    sizes = []

    def one_size(drafter, tree):
        sizes.append(tree.size)
        return (tree.size,)

    # The loop is traced anew, with passes of one size, and is forgotten afterwards.
    monkeypatch.setattr(verification, "tree_sizes", one_size)
    decode_on_device.clear_cache()
    all_nodes = decoder.decode(method, prompts, options)
    decode_on_device.clear_cache()
    assert sizes
    nodes = np.concatenate([text.nodes for text in fewer])
    assert nodes.min() <= size < nodes.max()
    assert_same(fewer, all_nodes, *STEPS)
