import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.base.errors import UserError
from bpd_jax.data.example_pieces import Truncation, cut_documents, join_examples

END, SEPARATOR = 0, 1


def example(inputs, targets):
    return {
        "inputs": np.array([END, *inputs, SEPARATOR], np.int32),
        "targets": np.array([*targets, END], np.int32),
    }


def join(examples, length):
    truncation = Truncation()
    return [
        piece.T.tolist() for piece in join_examples(examples, length, 1, truncation)
    ], truncation


@pytest.mark.parametrize(
    "length, tokens, truncation",
    [
        (9, [0, 7, 8, 9, 1, 4, 5, 0], Truncation(0, 0, 0)),
        (8, [0, 7, 8, 9, 1, 4, 5, 0], Truncation(0, 0, 0)),
        (7, [0, 7, 8, 1, 4, 5, 0], Truncation(1, 0, 1)),
        (5, [0, 1, 4, 5, 0], Truncation(1, 0, 3)),
        (4, [0, 1, 4, 5], Truncation(1, 1, 4)),
        (3, [0, 1, 4], Truncation(1, 1, 5)),
    ],
)
def test_inputs_are_truncated_before_targets(length, tokens, truncation):
    (piece,), actual = join([example([7, 8, 9], [4, 5])], length)
    loss_mask = [int(position > tokens.index(1)) for position in range(len(tokens))]
    assert piece == [tokens, loss_mask]
    assert actual == truncation


def test_row_without_room_for_a_target_is_refused():
    with pytest.raises(UserError, match="take 2 tokens of a row"):
        join([example([7], [4])], 2)


lists = st.lists(st.integers(2, 99), max_size=12)


@given(st.lists(st.tuples(lists, lists), max_size=5), st.integers(3, 20))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_targets_are_complete_if_they_fit(pairs, length):
    pieces, truncation = join([example(*pair) for pair in pairs], length)
    assert len(pieces) == len(pairs)
    for (inputs, targets), (tokens, loss_mask) in zip(pairs, pieces, strict=True):
        assert len(tokens) == min(length, len(inputs) + len(targets) + 3)
        start = loss_mask.index(1)
        assert loss_mask == [0] * start + [1] * (len(tokens) - start)
        assert tokens[start:] == [*targets, END][: length - 2]
        assert tokens[0] == END
        assert tokens[start - 1] == SEPARATOR
        assert tokens[1 : start - 1] == inputs[: start - 2]
    total = sum(len(inputs) + len(targets) + 3 for inputs, targets in pairs)
    assert truncation.tokens == total - sum(len(tokens) for tokens, _ in pieces)


def test_documents_are_split_into_pieces():
    pieces = cut_documents([np.arange(7), np.arange(3)], 3)
    assert [piece.tolist() for piece in pieces] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
        [0, 1, 2],
    ]
