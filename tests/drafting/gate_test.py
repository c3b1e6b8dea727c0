"""Drafting only while calls yield more tokens than they cost."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.drafting.gate import GatedDrafter
from bpd_jax.drafting.interface import Outcome, Prompts
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.searches.tree import BestFirst
from bpd_jax.drafting.sources.heads import HeadsSource
from bpd_jax.models.cache import write_rows
from tests.drafting.naive import random_lattice, random_view

CALLS = 64
VIEW = random_view(random_lattice(0))
HEADS, SEARCH = Paths(HeadsSource(4, 3)), BestFirst(6)


def start(gated, rows=2, features=None):
    """The memory after the first prompts of the view."""
    texts = VIEW.tokens[:rows], VIEW.lengths[:rows]
    if features is None:
        features = jnp.zeros((*texts[0].shape, 0))
    return gated.start(gated.arrays, Prompts(*texts, features, None))


@pytest.mark.parametrize(
    "price, accepted, want",
    [
        # The average falls from 2.5 to below 1.5 in eleven calls; then the 17th tries,
        # and the 33rd after it.
        (1.5, [1, 1], [*range(11), 27, 60]),
        # A finished row does not count.
        (1.5, [1, 0], [*range(11), 27, 60]),
        (1.9, [2, 2], range(CALLS)),
        # All rows share the time of a call.
        (1.9, [1, 3], range(CALLS)),
        (1.0, [1, 1], range(CALLS)),
    ],
)
def test_calls_draft_while_they_pay_and_try_again(price, accepted, want):
    gated = GatedDrafter(PathDrafter(HEADS, SEARCH), price)
    arrays, memory = gated.arrays, start(gated)
    drafted = []
    for call in range(CALLS):
        tree, entropies, memory = draft(gated, arrays, memory)
        has_drafts = bool(tree.valid[:, 1:].any())
        assert tree.valid.all() == has_drafts
        assert np.isnan(entropies).all() == (not has_drafts)
        np.testing.assert_array_equal(tree.tokens[:, 0], VIEW.next_token)
        drafted += [call] * has_drafts
        count = np.array(accepted, np.int32)
        count = count if has_drafts else np.minimum(count, 1)
        memory = learn(gated, arrays, memory, tree, count)
    assert drafted == list(want)


@functools.partial(jax.jit, static_argnums=0)
def draft(gated, arrays, memory):
    seen, memory = gated.look(VIEW, arrays, memory)
    return gated.propose(seen, arrays), gated.entropies(seen), memory


@functools.partial(jax.jit, static_argnums=0)
def learn(gated, arrays, memory, tree, count):
    features = jnp.zeros((len(count), gated.max_depth, 0))
    return gated.learn(arrays, memory, Outcome(tree, None, count, features, None))


def test_after_drafts_that_fail_they_are_tried_as_soon_as_at_first():
    """A trial that pays ends the longer waits, though the average stays low."""
    gated = GatedDrafter(PathDrafter(HEADS, SEARCH), 1.5)
    memory, drafted = start(gated), []
    for call in range(130):
        tree, _, memory = draft(gated, gated.arrays, memory)
        if tree.valid[:, 1:].any():
            drafted.append(call)
        # After the first trial has failed, the second one yields two tokens.
        tokens = 2 if drafted[-1] == call == 60 else 1
        memory = learn(gated, gated.arrays, memory, tree, np.full(2, tokens, np.int32))
    assert drafted[11:] == [27, 60, 77, 110]


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
    gated = GatedDrafter(Recorder(HEADS, SEARCH), 1.5)
    memory = start(gated, features=jnp.zeros((2, 3, 1)))
    memory = dataclasses.replace(memory, expected=jnp.ones(2))

    @jax.jit
    def call(memory, counts, features):
        seen, memory = gated.look(VIEW, gated.arrays, memory)
        learned = memory.inner[1]
        outcome = Outcome(
            gated.propose(seen, gated.arrays), None, counts, features, None
        )
        return seen[0], learned, gated.learn(gated.arrays, memory, outcome)

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
