"""Tests of bpd_jax.ngrams.trie."""

import numpy as np
import pytest

from bpd_jax.errors import UserError
from bpd_jax.ngrams import trie

# The worked example of the module: V = 3, sentences `0 1` and `0`.
WIDTH = 5
KEYS = (np.array([0, 1, 3, 4]), np.array([1, 3, 8, 15]))


def test_ngrams_are_those_of_the_worked_example() -> None:
    assert trie.ngrams(KEYS, 1, WIDTH).tolist() == [[0], [1], [3], [4]]
    assert trie.ngrams(KEYS, 2, WIDTH).tolist() == [[0, 1], [0, 3], [1, 3], [4, 0]]


def test_vocabulary_size_is_limited() -> None:
    trie.check_vocab_size(2**24)
    with pytest.raises(UserError, match=r"a\.txt: a vocabulary of 16,777,217 tokens"):
        trie.check_vocab_size(2**24 + 1, "a.txt")


def test_find_returns_the_index_or_minus_one() -> None:
    parents = np.array([0, 0, 1, 3, -1, 0])
    symbols = np.array([1, 2, 3, 0, 1, -1])
    indices = trie.find(KEYS[1], parents, symbols, WIDTH)
    assert indices.tolist() == [0, -1, 2, 3, -1, -1]


def test_find_in_empty_keys_returns_minus_one() -> None:
    no_keys = np.zeros(0, np.int64)
    assert trie.find(no_keys, np.array([0]), np.array([1]), WIDTH).tolist() == [-1]


def test_missing_symbol_is_not_confused_with_the_previous_parent() -> None:
    # Key 4 is symbol 4 after parent 0; parent 1 with symbol -1 must not hit it.
    indices = trie.find(np.array([4]), np.array([1]), np.array([-1]), WIDTH)
    assert indices.tolist() == [-1]


def test_suffix_links_and_children() -> None:
    first, second = trie.suffix_links(KEYS, WIDTH)
    assert first.tolist() == [0, 0, 0, 0]
    assert second.tolist() == [1, 2, 2, 0]
    assert trie.child_counts(KEYS, 1, WIDTH).tolist() == [2, 1, 0, 1]
    assert trie.child_counts(KEYS, 2, WIDTH).tolist() == [0, 0, 0, 0]


def test_select_renumbers_the_parents() -> None:
    keep = [np.array([True, False, True, True]), np.array([False, True, False, True])]
    keys = trie.select(KEYS, keep, WIDTH)
    assert trie.ngrams(keys, 2, WIDTH).tolist() == [[0, 3], [4, 0]]


def test_select_omits_empty_orders() -> None:
    keep = [np.ones(4, bool), np.zeros(4, bool)]
    assert len(trie.select(KEYS, keep, WIDTH)) == 1


def test_closure_adds_prefixes_and_suffixes() -> None:
    keep = [np.zeros(4, bool), np.array([False, True, False, False])]
    closed = trie.closed_under_affixes(KEYS, keep, WIDTH)
    assert closed[0].tolist() == [True, False, True, False]
    assert not keep[0].any()
