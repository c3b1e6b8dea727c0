"""Drafting only while calls yield more tokens than they cost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.drafting import gate
from bpd_jax.drafting.gate import GatedDrafter
from bpd_jax.drafting.interface import Outcome, Prompts
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.searches.tree import BestFirst
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.models.cache import write_rows
from tests.drafting.naive import random_lattice, random_view

CALLS = 60


def earlier(usual, costs=(0, 0)):
    """What was learned of earlier texts, in batches of two rows."""
    return {2: {"usual": np.float32(usual), "costs": np.float32(costs)}}


@pytest.mark.parametrize(
    "price, accepted, want",
    [
        # The average falls from 2 to below 1.5 in eight calls; then the 17th tries, and
        # the 33rd after it.
        (1.5, [1, 1], [*range(8), 24, 57]),
        # A finished row does not count.
        (1.5, [1, 0], [*range(8), 24, 57]),
        (1.9, [2, 2], range(CALLS)),
        # All rows share the time of a call.
        (1.9, [1, 3], range(CALLS)),
        (1.0, [1, 1], range(CALLS)),
    ],
)
def test_calls_draft_while_they_pay_and_try_again(price, accepted, want):
    """Where earlier texts yielded two tokens per call."""
    lattice = random_lattice(0)
    view = random_view(lattice)
    inner = PathDrafter(Paths(HeadsSource(4, 3)), BestFirst(6))
    gated = GatedDrafter(inner, price, timed=False, kept=earlier(2.0))
    memory = gated.start(gated.arrays, Prompts(view.tokens, view.lengths, None, None))
    memory = gated.recall(memory)

    @jax.jit
    def draft(memory):
        seen, memory = gated.look(view, gated.arrays, memory)
        return gated.propose(seen, gated.arrays), gated.entropies(seen), memory

    @jax.jit
    def learn(memory, tree, count):
        features = jnp.zeros((*tree.tokens.shape[:1], gated.max_depth, 0))
        outcome = Outcome(tree, None, count, features, None)
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


class Clock:
    """Lets time pass: a call with drafts takes 30 microseconds, one without 10."""

    def __init__(self):
        self.now = 5

    def __call__(self, after):
        del after
        return jnp.uint32(self.now)


def test_the_price_is_what_calls_take(monkeypatch):
    """3 here, where 1.5 was assumed: calls of 2 tokens do not pay.

    Calls of 4 tokens need no proof: none is made without drafts to know its time.
    """
    clock = Clock()
    monkeypatch.setattr(gate, "microseconds", clock)
    lattice = random_lattice(0)
    view = random_view(lattice)
    inner = PathDrafter(Paths(HeadsSource(4, 3)), BestFirst(6))
    gated = GatedDrafter(inner, 1.5)

    def shares(tokens, first=10):
        """The share of drafts among the calls of each quarter."""
        memory = gated.start(
            gated.arrays, Prompts(view.tokens, view.lengths, None, None)
        )
        drafted = []
        for _ in range(CALLS):
            seen, memory = gated.look(view, gated.arrays, memory)
            tree = gated.propose(seen, gated.arrays)
            has_drafts = bool(seen.opens)
            plain = 10 if False in drafted else first
            clock.now += 30 if has_drafts else plain
            counts = jnp.full(2, tokens if has_drafts else 1)
            features = jnp.zeros((2, gated.max_depth, 0))
            outcome = Outcome(tree, None, counts, features, None)
            memory = gated.learn(gated.arrays, memory, outcome)
            clock.now += 1000  # Between calls.
            drafted.append(has_drafts)
        return np.reshape(drafted, (4, -1)).mean(1), memory

    few, learned = shares(2)
    assert few[1:].max() < 0.1
    assert learned.costs.tolist() == [[10, 30]] * 2
    all_of_them, memory = shares(4)
    assert all_of_them.tolist() == [1] * 4
    assert memory.costs.tolist() == [[0, 30]] * 2

    # Nor do they if the first call without drafts took long.
    few, memory = shares(2, first=60)
    assert few[1:].max() < 0.1
    assert memory.costs[0, 0] < 12

    # Batches of as many texts begin with that; calls of two tokens do not pay at once.
    gated.keep(learned)
    again = gated.recall(memory)
    assert again.costs.tolist() == [[10, 30]] * 2
    np.testing.assert_array_equal(again.usual, learned.usual)
    other = gated.start(
        gated.arrays, Prompts(view.tokens[:1], view.lengths[:1], None, None)
    )
    assert gated.recall(other).costs.tolist() == [[0, 0]]


def test_texts_that_depend_on_drafts_do_not_depend_on_earlier_texts():
    untimed = GatedDrafter(
        PathDrafter(Paths(HeadsSource(4, 3)), BestFirst(6)), 1.5, False
    )
    view = random_view(random_lattice(0))
    memory = untimed.start(
        untimed.arrays, Prompts(view.tokens, view.lengths, None, None)
    )
    untimed.keep(dataclasses.replace(memory, calls=jnp.ones(2)))
    assert not untimed.kept
    # Nor is the memory read, of which a process of several has a part.
    untimed.keep(None)


class Recorder(PathDrafter):
    """Remembers the features that it learns, `[B, 64, 1]`, and how often it does."""

    def start(self, arrays, prompts):
        rows = len(prompts.lengths)
        learned = jnp.zeros((rows, 64, 1)), jnp.zeros(rows, int), jnp.int32(0)
        return *learned, super().start(arrays, prompts)

    def look(self, view, arrays, memory):
        seen, _ = super().look(view, arrays, memory[-1])
        return seen, memory

    def learn(self, arrays, memory, outcome):
        kept, lengths, times, rest = memory
        kept = write_rows(kept, outcome.features, lengths)
        return kept, lengths + outcome.count, times + 1, rest


def test_what_is_learned_late_is_complete():
    """Each accepted token is learned once, and all of them before drafts."""
    lattice = random_lattice(0)
    view = random_view(lattice)
    inner = Recorder(Paths(HeadsSource(4, 3)), BestFirst(6))
    gated = GatedDrafter(inner, 1.5, kept=earlier(1.0))
    features = jnp.zeros((2, 3, 1))
    memory = gated.start(
        gated.arrays, Prompts(view.tokens, view.lengths, features, None)
    )
    memory = gated.recall(memory)
    texts, calls = [[], []], 0
    rng = np.random.default_rng(0)
    while min(map(len, texts)) < 30:
        seen, memory = gated.look(view, gated.arrays, memory)
        if seen.opens:
            assert memory.inner[1].tolist() == list(map(len, texts))
        counts = rng.integers(0, 2, 2)  # A row that is finished has 0.
        features = rng.random((2, gated.max_depth, 1), np.float32)
        for text, count, row in zip(texts, counts, features, strict=True):
            text += row[:count, 0].tolist()
        tree = gated.propose(seen, gated.arrays)
        outcome = Outcome(tree, None, counts, features, None)
        memory = gated.learn(gated.arrays, memory, outcome)
        calls += 1
    kept, lengths, times, _ = memory.inner
    assert times < calls / 2
    for text, row, length in zip(texts, kept, lengths, strict=True):
        assert len(text) - length < gated.max_depth
        np.testing.assert_array_equal(row[:length, 0], text[:length])
