import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.ngrams.counting import windows
from bpd_jax.ngrams.counting.windows import Packing

SEQUENCES = st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=20)


def digits_of(rows, packing):
    windows_digits = []
    for row in rows.tolist():
        digits = []
        for word, length in zip(row, packing.lengths.tolist(), strict=True):
            places = range(length - 1, -1, -1)
            digits += [word // packing.base**place % packing.base for place in places]
        windows_digits.append(tuple(digits))
    return windows_digits


def slow_windows(stream, packing):
    eos = packing.vocab_size
    counts = {}
    for begin in range(len(stream)):
        window = stream[begin : begin + packing.order]
        if eos in window:
            window = window[: window.index(eos) + 1]
        padding = [0] * (packing.order - len(window))
        digits = (*(symbol + 1 for symbol in window), *padding)
        counts[digits] = counts.get(digits, 0) + 1
    return counts


@pytest.mark.parametrize(
    "order, vocab_size, lengths",
    [
        (5, 128_256, [3, 2]),
        (9, 50_257, [4, 4, 1]),
        (4, 2**31 - 4, [2, 2]),
        (3, 1, [3]),
    ],
)
def test_words_contain_as_many_symbols_as_fit(order, vocab_size, lengths):
    packing = Packing(order, vocab_size)
    assert packing.lengths.tolist() == lengths
    assert packing.base ** max(lengths) <= 2**64


@given(SEQUENCES, st.integers(1, 9), st.sampled_from([7, 5_000, 3_000_000]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_windows_are_sorted_and_counted(sequences, order, vocab_size):
    packing = Packing(order, vocab_size)
    stream = windows.add_boundaries(
        windows.join(sequences), vocab_size=vocab_size, end_of_text=None
    )
    occurrences = np.bincount(stream, minlength=vocab_size + 2)
    for parts in (1, 4):
        part_of = windows.balanced_parts(occurrences, parts)
        windows_by_part = windows.sorted_parts(stream, packing, part_of)
        lists = list(windows_by_part.parts)
        assert len(lists) == windows_by_part.number <= parts
        digits = [row for part in lists for row in digits_of(part.rows, packing)]
        assert digits == sorted(digits)
        counts = np.concatenate([part.counts for part in lists]).tolist()
        assert len(digits) <= windows_by_part.most
        expected = slow_windows(stream.tolist(), packing)
        assert dict(zip(digits, counts, strict=True)) == expected


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=12),
    st.sampled_from([None, 0, 3]),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_streams_equal_those_of_a_loop(sequences, end_of_text):
    expected = []
    for sequence in sequences:
        pieces = [[]]
        for token in sequence:
            if token == end_of_text:
                pieces.append([])
            else:
                pieces[-1].append(token)
        for piece in [piece for piece in pieces if piece] or [[]]:
            expected += [5, *piece, 4]
    stream = windows.add_boundaries(
        windows.join(sequences), vocab_size=4, end_of_text=end_of_text
    )
    assert stream.tolist() == expected
