"""Lookahead's memory and tree against a reference implementation in plain Python."""

import types

import jax
import numpy as np
import pytest

from bpd_jax.drafting.interface import Outcome, Prompts
from bpd_jax.drafting.sources.lookahead import LookaheadDrafter
from tests.drafting.naive import path_to

VOCAB = 4


class Twin:
    """One row: lists instead of arrays."""

    def __init__(self, drafter, prompt, window):
        self.drafter, self.window = drafter, window
        ends = range(len(prompt), drafter.order - 1, -1)
        latest = [tuple(prompt[end - drafter.order : end]) for end in ends]
        self.pool = self.renewed(latest[: drafter.pool_size], [])

    def renewed(self, latest, pool):
        return list(dict.fromkeys([*latest, *pool]))[: self.drafter.pool_size]

    def paths(self, next_token):
        """From the certain token to every node, in the order of the nodes."""
        self.window[0][0] = next_token
        ngrams = [ngram for ngram in self.pool if ngram[0] == next_token]
        guesses = [
            [list(ngram[: length + 1]) for length in range(1, self.drafter.order)]
            for ngram in ngrams[: self.drafter.guesses]
        ]
        window = [
            self.window[0][: column + 1]
            + [self.window[above][column] for above in range(1, level + 1)]
            for level in range(self.drafter.order - 1)
            for column in range(self.drafter.window)
        ]
        return guesses, window

    def learn(self, level, count):
        """Takes the model's predictions after the last level of the window."""
        if count == 0:
            return
        levels = [*self.window, level]
        ngrams = [tuple(column) for column in zip(*levels, strict=True)]
        self.pool = self.renewed(ngrams, self.pool)
        shift = (count - 1) % self.drafter.window
        self.window = [level[shift:] + level[:shift] for level in levels[1:]]


def assert_tree(drafter, tree, row, guesses, window):
    steps, size = drafter.order - 1, drafter.max_nodes
    assert tree.size == size
    assert tree.num_chains == 0
    chains = [[0]] + [
        [1 + guess * steps + step for step in range(steps)]
        for guess in range(drafter.guesses)
    ]
    for guess, nodes in enumerate(chains[1:]):
        assert tree.valid[row, nodes].tolist() == [guess < len(guesses)] * steps
        assert tree.ranks[row, nodes].tolist() == [guess] * steps
        if guess < len(guesses):
            assert [list(path_to(tree, row, n)) for n in nodes] == guesses[guess]
    nodes = [0, *range(1 + drafter.guesses * steps, size)]
    assert tree.valid[row, nodes].all()
    assert [list(path_to(tree, row, node)) for node in nodes] == window
    for node in range(size):
        parent = tree.parents[row, node]
        above = -1 if parent < 0 else tree.depths[row, parent]
        assert parent < node
        assert tree.depths[row, node] == above + 1
    assert tree.depths.max() == drafter.max_depth - 1
    leaves = set(range(size)) - set(tree.parents[row].tolist())
    assert len(leaves) <= drafter.max_drafts


@pytest.mark.parametrize(
    "window, order, guesses, pool_size", [(5, 4, 3, 12), (1, 3, 2, 50), (3, 2, 4, 6)]
)
def test_memory_and_tree_equal_the_twin(window, order, guesses, pool_size):
    drafter = LookaheadDrafter(window, order, guesses, pool_size)
    rng = np.random.default_rng(window)
    lengths = np.array([1, order, 18], np.int32)
    tokens = rng.integers(0, VOCAB, (3, 30)).astype(np.int32)
    memory = jax.jit(drafter.start)(None, Prompts(tokens, lengths, None, None))
    twins = []
    for row, length in enumerate(lengths):
        prompt = tokens[row, :length].tolist()
        levels = np.asarray(memory.window)[row].tolist()
        endless = prompt * order
        for column in zip(*levels, strict=True):
            assert any(
                list(column) == endless[begin : begin + order - 1]
                for begin in range(length)
            )
        twins.append(Twin(drafter, prompt, levels))

    @jax.jit
    def propose(memory, next_token):
        view = types.SimpleNamespace(next_token=next_token)
        seen, memory = drafter.look(view, None, memory)
        return drafter.propose(seen, None), memory

    @jax.jit
    def learn(memory, tree, choices, count):
        return drafter.learn(None, memory, Outcome(tree, choices, count, None, None))

    used = 0
    for turn in range(8):
        for row, twin in enumerate(twins):
            pool = np.asarray(memory.pool)[row].tolist()
            empty = [[-1] * order] * (pool_size - len(twin.pool))
            assert pool == [*map(list, twin.pool), *empty]
            assert np.asarray(memory.window)[row].tolist() == twin.window
        next_token = rng.integers(0, VOCAB, 3).astype(np.int32)
        before = [[list(level) for level in twin.window] for twin in twins]
        tree, memory = propose(memory, next_token)
        tree = jax.device_get(tree)
        choices = rng.integers(0, VOCAB, tree.tokens.shape).astype(np.int32)
        count = rng.integers(1, drafter.max_depth + 1, 3).astype(np.int32)
        count[turn % 3] *= turn % 2  # In some calls a row is finished.
        for row, twin in enumerate(twins):
            guessed, columns = twin.paths(int(next_token[row]))
            assert_tree(drafter, tree, row, guessed, columns)
            used += len(guessed)
            last = [0, *range(tree.size - window * (order - 1) + 1, tree.size)]
            level = choices[row, last[-window:]].tolist()
            if count[row] == 0:
                twin.window = before[row]
            twin.learn(level, int(count[row]))
        memory = learn(memory, tree, choices, count)
    assert used > 8
