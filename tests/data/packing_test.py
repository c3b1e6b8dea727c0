import numpy as np
import pytest
import seqio
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.data import packing
from bpd_jax.data.packing import PackingConverter, pack


def targets(pieces):
    return tf.data.Dataset.from_generator(
        lambda: ({"targets": np.array(piece, np.int32)} for piece in pieces),
        output_signature={"targets": tf.TensorSpec([None], tf.int32)},
    )


def segments(tokens, segment_ids):
    """The pieces of one row, and whether padding lies at its end only."""
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
def test_every_piece_lies_whole_in_one_row(pieces, open_rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_OPEN_ROWS", open_rows)
        rows = list(pack([np.array(piece) for piece in pieces], 7))
    packed = [piece for row in rows for piece in segments(*row)]
    assert sorted(packed) == sorted(tuple(piece) for piece in pieces)
    if open_rows == 64:  # Best fit: no two rows but the last would fit in one.
        used = sorted(np.count_nonzero(ids) for _, ids in rows)
        assert len(used) < 2 or used[0] + used[1] > 7


def test_worked_example():
    rows = list(pack([np.array([1, 2, 3]), np.array([4, 5, 6, 7]), np.array([8])], 4))
    assert [tokens.tolist() for tokens, _ in rows] == [[4, 5, 6, 7], [1, 2, 3, 8]]
    assert [ids.tolist() for _, ids in rows] == [[1, 1, 1, 1], [1, 1, 1, 2]]


def test_converter_fields():
    rows = PackingConverter()(targets([[5, 6, 7], [8, 9]]), {"targets": 6})
    seqio.test_utils.assert_dataset(
        rows,
        {
            "tokens": [5, 6, 7, 8, 9, 0],
            "segment_ids": [1, 1, 1, 2, 2, 0],
            "positions": [0, 1, 2, 0, 1, 0],
            "loss_mask": [True, True, True, True, True, False],
        },
        expected_dtypes={
            "tokens": tf.int32,
            "segment_ids": tf.int32,
            "positions": tf.int32,
            "loss_mask": tf.bool,
        },
    )


def test_tokens_of_id_0_are_kept():
    pieces = [[0, 0], [7, 0], [0]]
    rows = PackingConverter()(targets(pieces), {"targets": 6})
    seqio.test_utils.assert_dataset(
        rows,
        {
            "tokens": [0, 0, 7, 0, 0, 0],
            "segment_ids": [1, 1, 2, 2, 3, 0],
            "positions": [0, 1, 0, 1, 0, 0],
            "loss_mask": [True, True, True, True, True, False],
        },
    )
    # What seqio's own converter makes of them, the reason for ours.
    stock = seqio.LMFeatureConverter(pack=True)(targets(pieces), {"targets": 6})
    weights = next(stock.as_numpy_iterator())["decoder_loss_weights"]
    assert weights.sum() < 5


def test_more_rows_than_a_block():
    rows = PackingConverter()(targets([[n] * 3 for n in range(600)]), {"targets": 3})
    assert [row["tokens"][0] for row in rows.as_numpy_iterator()] == list(range(600))


def test_piece_longer_than_a_row_is_refused():
    with pytest.raises(tf.errors.OpError, match="not less than or equal"):
        list(PackingConverter()(targets([[1, 2, 3]]), {"targets": 2}))
