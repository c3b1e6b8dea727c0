from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting.counts import (
    NGramCounts,
    count_ngrams,
    with_min_counts,
)
from bpd_jax.ngrams.model import NGramModel
from tests.ngrams.helpers import assert_same

SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=20)


def as_dict(counts):
    return {
        tuple(row): int(number)
        for order, numbers in enumerate(counts.counts, start=1)
        for row, number in zip(counts.ngrams(order).tolist(), numbers, strict=True)
    }


def slow_counts(sequences, order):
    counts = Counter()
    for sequence in sequences:
        symbols = [5, *sequence, 4]  # <s> and </s> of V = 4
        for size in range(1, order + 1):
            for start in range(len(symbols) - size + 1):
                counts[tuple(symbols[start : start + size])] += 1
    return counts


@given(SEQUENCES, st.integers(1, 5))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_counts_equal_those_of_a_loop(sequences, order):
    counts = count_ngrams(sequences, order=order, vocab_size=4)
    assert as_dict(counts) == slow_counts(sequences, order)
    assert counts.tokens == sum(len(sequence) for sequence in sequences)


@given(SEQUENCES, st.lists(st.integers(1, 5), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_min_counts_keep_frequent_ngrams_and_their_affixes(sequences, minimums):
    all_counts = slow_counts(sequences, 4)
    thresholds = (1, *minimums)
    expected = {
        gram for gram, n in all_counts.items() if n >= thresholds[len(gram) - 1]
    }
    for size in (4, 3, 2):
        longer = [gram for gram in expected if len(gram) == size]
        expected.update(gram[:-1] for gram in longer)
        expected.update(gram[1:] for gram in longer)
    counts = with_min_counts(count_ngrams(sequences, order=4, vocab_size=4), thresholds)
    assert as_dict(counts) == {gram: all_counts[gram] for gram in expected}


def test_followed_includes_dropped_ngrams():
    counts = count_ngrams([[0, 1], [0, 1], [0, 2]], order=2)
    pruned = with_min_counts(counts, [1, 2])
    assert pruned.ngrams(2).tolist() == [[0, 1], [1, 3], [4, 0]]
    np.testing.assert_allclose(pruned.followed[0], [3, 2, 1, 0, 3], rtol=1e-6)


@pytest.mark.parametrize(
    "sequences, arguments, message",
    [
        ([], {"order": 2}, "empty"),
        ([[0], [1, 7]], {"order": 2, "vocab_size": 5}, "sequence 2 holds the token 7"),
        ([[0, -3]], {"order": 2}, "sequence 1 holds the token -3"),
        ([[0]], {"order": 2, "vocab_size": 1, "end_of_text": 1}, "end_of_text is 1"),
    ],
)
def test_bad_input_is_refused(sequences, arguments, message):
    with pytest.raises(UserError, match=message):
        count_ngrams(sequences, **arguments)


def test_counts_are_saved_and_loaded(tmp_path):
    all_counts = count_ngrams([[0, 1, 2], [0, 1], [2]], order=3, end_of_text=3)
    for counts in (all_counts, with_min_counts(all_counts, [1, 2, 2])):
        counts.save(tmp_path / "one")
        loaded = NGramCounts.load(tmp_path / "one")
        assert_same(loaded, counts)
        assert (loaded.end_of_text, loaded.seen) == (3, all_counts.sizes)
        assert (loaded.sequences, loaded.tokens) == (3, 6)
    with pytest.raises(UserError, match=r"ngram_model\.json"):
        NGramModel.load(tmp_path / "one")
