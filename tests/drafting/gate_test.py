"""Drafting only while calls yield more tokens than they cost."""

import jax
import numpy as np
import pytest

from bpd_jax.drafting.gate import GatedDrafter
from bpd_jax.drafting.interface import Outcome, Prompts
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.searches.tree import BestFirst
from bpd_jax.drafting.sources.heads import HeadsSource
from tests.drafting.naive import random_lattice, random_view

CALLS = 60


@pytest.mark.parametrize(
    "price, accepted, want",
    [
        # The average falls from 2.5 to below 1.5 in four calls; then each 17th tries.
        (1.5, [1, 1], [0, 1, 2, 3, 20, 37, 54]),
        # A finished row does not count.
        (1.5, [1, 0], [0, 1, 2, 3, 20, 37, 54]),
        (1.9, [2, 2], range(CALLS)),
        # All rows share the time of a call.
        (1.9, [1, 3], range(CALLS)),
        (1.0, [1, 1], range(CALLS)),
    ],
)
def test_calls_draft_while_they_pay_and_try_again(price, accepted, want):
    lattice = random_lattice(0)
    view = random_view(lattice)
    inner = PathDrafter(Paths(HeadsSource(4, 3)), BestFirst(6))
    gated = GatedDrafter(inner, price)
    memory = gated.start(gated.arrays, Prompts(view.tokens, view.lengths, None, None))

    @jax.jit
    def draft(memory):
        seen, memory = gated.look(view, gated.arrays, memory)
        return gated.propose(seen, gated.arrays), gated.entropies(seen), memory

    @jax.jit
    def learn(memory, tree, count):
        outcome = Outcome(tree, None, count, None, None)
        return gated.learn(gated.arrays, memory, outcome)

    drafted = []
    for call in range(CALLS):
        tree, entropies, memory = draft(memory)
        has_drafts = bool(tree.valid[:, 1:].any())
        assert tree.valid.all() == has_drafts
        assert np.isnan(entropies).all() == (not has_drafts)
        np.testing.assert_array_equal(tree.tokens[:, 0], view.next_token)
        drafted += [call] * has_drafts
        count = np.array(accepted, np.int32)
        memory = learn(memory, tree, count if has_drafts else np.minimum(count, 1))
    assert drafted == list(want)
