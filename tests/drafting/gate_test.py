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
VIEW = random_view(random_lattice(0))
HEADS, SEARCH = Paths(HeadsSource(4, 3)), BestFirst(6)


def start(gated, rows=2, features=None):
    """The memory after the first prompts of the view."""
    texts = VIEW.tokens[:rows], VIEW.lengths[:rows]
    if features is None:
        features = jnp.zeros((*texts[0].shape, 0))
    return gated.start(gated.arrays, Prompts(*texts, features, None))


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
    inner = PathDrafter(HEADS, SEARCH)
    gated = GatedDrafter(inner, price, timed=False, kept=earlier(2.0))
    memory = gated.recall(start(gated))

    @jax.jit
    def draft(memory):
        seen, memory = gated.look(VIEW, gated.arrays, memory)
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
        np.testing.assert_array_equal(tree.tokens[:, 0], VIEW.next_token)
        drafted += [call] * has_drafts
        count = np.array(accepted, np.int32)
        memory = learn(memory, tree, count if has_drafts else np.minimum(count, 1))
    assert drafted == list(want)


def test_the_price_is_what_calls_take(monkeypatch):
    """3 here, where 1.5 was assumed: calls of 2 tokens do not pay.

    A call with drafts takes 30 microseconds, one without 10. Calls of 4 tokens need no
    proof: none is made without drafts to know its time.
    """
    gated = GatedDrafter(PathDrafter(HEADS, SEARCH), 1.5)

    @jax.jit
    def call(memory, now, tokens, plain):
        monkeypatch.setattr(gate, "microseconds", lambda after: now)
        seen, memory = gated.look(VIEW, gated.arrays, memory)
        tree = gated.propose(seen, gated.arrays)
        end = now + jnp.where(seen.opens, jnp.uint32(30), plain)
        monkeypatch.setattr(gate, "microseconds", lambda after: end)
        counts = jnp.where(seen.opens, jnp.full(2, tokens), 1)
        outcome = Outcome(tree, None, counts, jnp.zeros((2, gated.max_depth, 0)), None)
        return gated.learn(gated.arrays, memory, outcome), seen.opens, end

    def shares(tokens, first=10):
        """The share of drafts among the calls of each quarter."""
        memory, drafted, now = start(gated), [], 5
        for _ in range(CALLS):
            plain = jnp.uint32(10 if False in drafted else first)
            memory, opens, now = call(memory, jnp.uint32(now), tokens, plain)
            now += 1000  # Between calls.
            drafted.append(bool(opens))
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
    assert gated.recall(start(gated, rows=1)).costs.tolist() == [[0, 0]]


def test_texts_that_depend_on_drafts_do_not_depend_on_earlier_texts():
    untimed = GatedDrafter(PathDrafter(HEADS, SEARCH), 1.5, False)
    untimed.keep(dataclasses.replace(start(untimed), calls=jnp.ones(2)))
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
    gated = GatedDrafter(Recorder(HEADS, SEARCH), 1.5, kept=earlier(1.0))
    memory = gated.recall(start(gated, features=jnp.zeros((2, 3, 1))))

    @jax.jit
    def call(memory, counts, features):
        seen, memory = gated.look(VIEW, gated.arrays, memory)
        learned = memory.inner[1]
        outcome = Outcome(
            gated.propose(seen, gated.arrays), None, counts, features, None
        )
        return seen.opens, learned, gated.learn(gated.arrays, memory, outcome)

    texts, calls = [[], []], 0
    rng = np.random.default_rng(0)
    while min(map(len, texts)) < 30:
        counts = rng.integers(0, 2, 2)  # A row that is finished has 0.
        features = rng.random((2, gated.max_depth, 1), np.float32)
        opens, learned, memory = call(memory, counts, features)
        if opens:
            assert learned.tolist() == list(map(len, texts))
        for text, count, row in zip(texts, counts, features, strict=True):
            text += row[:count, 0].tolist()
        calls += 1
    kept, lengths, times, _ = memory.inner
    assert times < calls / 2
    for text, row, length in zip(texts, kept, lengths, strict=True):
        assert len(text) - length < gated.max_depth
        np.testing.assert_array_equal(row[:length, 0], text[:length])
