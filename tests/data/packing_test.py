import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.base.errors import UserError
from bpd_jax.data import packing
from bpd_jax.data.packing import join_examples, pack, pad


def segments(tokens, segment_ids):
    """The pieces of one row; checks that padding is at its end only."""
    count = segment_ids.max()
    real = np.count_nonzero(segment_ids)
    assert (segment_ids[:real] > 0).all()
    assert (np.diff(segment_ids[:real]) >= 0).all()
    assert not tokens[real:].any()
    return [tuple(tokens[segment_ids == s].tolist()) for s in range(1, count + 1)]


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), max_size=60),
    open_rows=st.sampled_from([1, 3, 64]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_piece_is_in_one_row(pieces, open_rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_MAX_OPEN_ROWS", open_rows)
        rows = list(pack([np.array(piece) for piece in pieces], 7))
    packed = [piece for row in rows for piece in segments(*row)]
    assert sorted(packed) == sorted(tuple(piece) for piece in pieces)
    if open_rows == 64:  # Best fit: the two emptiest rows do not fit into one.
        lengths = sorted(np.count_nonzero(ids) for _, ids in rows)
        assert len(lengths) < 2 or lengths[0] + lengths[1] > 7


def test_values_of_a_token_stay_with_it():
    pieces = [np.array([[1, 10], [2, 20]]), np.array([[3, 30]])]
    [(row, segment_ids)] = pack(pieces, 4)
    assert row.tolist() == [[1, 10], [2, 20], [3, 30], [0, 0]]
    assert segment_ids.tolist() == [1, 1, 2, 0]


def test_pad_makes_one_row_per_piece():
    rows = [*pad([np.array([7, 8]), np.array([9, 5, 6])], 3)]
    assert [tokens.tolist() for tokens, _ in rows] == [[7, 8, 0], [9, 5, 6]]
    assert [ids.tolist() for _, ids in rows] == [[1, 1, 0], [1, 1, 1]]


END, SEPARATOR = 0, 1


def example(inputs, targets):
    return {
        "inputs": np.array([END, *inputs, SEPARATOR], np.int32),
        "targets": np.array([*targets, END], np.int32),
    }


def join(examples, length):
    truncation = collections.Counter()
    return [
        piece.T.tolist() for piece in join_examples(examples, length, 1, truncation)
    ], truncation


def test_row_without_room_for_a_target_is_refused():
    with pytest.raises(UserError, match="take 2 tokens of a row"):
        join([example([7], [4])], 2)


lists = st.lists(st.integers(2, 99), max_size=12)


@given(st.lists(st.tuples(lists, lists), max_size=5), st.integers(3, 20))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_inputs_are_truncated_before_targets(pairs, length):
    pieces, truncation = join([example(*pair) for pair in pairs], length)
    expected = collections.Counter()
    for (inputs, targets), piece in zip(pairs, pieces, strict=True):
        end = [*targets, END][: length - 2]
        begin = [END, *inputs][: length - 1 - len(end)]
        mask = [0] * (len(begin) + 1) + [1] * len(end)
        assert piece == [[*begin, SEPARATOR, *end], mask]
        expected["inputs"] += len(begin) <= len(inputs)
        expected["targets"] += len(end) <= len(targets)
        expected["tokens"] += len(inputs) + len(targets) + 3 - len(mask)
    assert truncation == expected
