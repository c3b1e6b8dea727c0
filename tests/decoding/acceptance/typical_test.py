"""Typical acceptance on hand-made arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.decoding.acceptance.typical import typical_match
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.draft_tree import from_drafts
from bpd_jax.drafting.lattice import Drafts

A, B, C, D = range(4)
# After A the model is fairly sure, after B not at all, after C and D quite sure of A.
PROBS = np.array(
    [[0.70, 0.20, 0.10, 0.0], [0.25, 0.25, 0.25, 0.25], [1, 0, 0, 0], [1, 0, 0, 0]]
)


match = jax.jit(typical_match, static_argnums=(4, 5))


def options(epsilon, delta):
    return DecodeOptions(
        temperature=1.0,
        acceptance="typical",
        typical_epsilon=epsilon,
        typical_delta=delta,
    )


def accepted(drafts, first, epsilon, delta):
    drafts = jnp.asarray([drafts])
    tree = from_drafts(Drafts(drafts, jnp.zeros(drafts.shape[:2])))
    with np.errstate(divide="ignore"):
        logits = jnp.log(jnp.asarray(PROBS, jnp.float32))[tree.tokens]
    keys = jax.random.key(0)[None]
    settings = options(epsilon, delta)
    result = match(tree, logits, jnp.array([first]), keys, settings, drafts.shape[2])
    return int(result.count[0]), int(result.rank[0]), result


# exp(-H) after A is 0.45, after B 0.25.
@pytest.mark.parametrize(
    "draft, epsilon, delta, count",
    [
        ([A, A, B], 0.3, 1.0, 2),  # 0.7 > 0.3, 0.2 < 0.3
        ([A, A, B], 0.19, 1.0, 3),
        ([A, A, C], 0.19, 1.0, 2),
        ([A, A, C], 0.3, 0.2, 3),  # 0.1 > 0.2 · 0.45
        ([A, B, D], 0.3, 0.46, 1),  # 0.2 < 0.3, and 0.2 < 0.46 · 0.45
        ([A, B, D], 0.3, 0.44, 3),  # 0.2 < 0.3, but 0.2 > 0.44 · 0.45
        ([B, D, A], 1.0, 0.9, 3),  # at high entropy, 0.25 suffices
        ([B, D, A], 1.0, 1.0, 1),  # must exceed exp(-H), not equal it
        ([A, D, A], 0.0, 0.0, 1),  # impossible tokens are never typical
        ([A, C, A], 0.0, 0.0, 3),  # all others are then
    ],
)
def test_a_token_must_pass_the_threshold(draft, epsilon, delta, count):
    assert accepted([draft], draft[0], epsilon, delta)[0] == count


def test_the_longest_draft_wins_then_the_better_rank():
    drafts = [[A, C, A], [A, A, A], [A, A, B]]
    count, rank, result = accepted(drafts, A, 0.3, 1.0)
    assert (count, rank) == (3, 1)
    assert result.path.tolist() == [[3, 4, 5]]


def test_the_root_must_be_the_certain_token():
    count, rank, _ = accepted([[B, A, A], [A, A, A]], A, 0.3, 1.0)
    assert (count, rank) == (3, 1)


def test_the_token_after_the_path_is_drawn_from_the_model():
    count, _, result = accepted([[A, C]], A, 0.0, 0.0)
    assert count == 2
    assert int(result.following[0, 1]) == A


def test_typical_acceptance_is_lossy():
    assert not options(0.3, 0.09).lossless
    assert DecodeOptions(temperature=1.0, acceptance="speculative").lossless
    assert DecodeOptions().lossless
