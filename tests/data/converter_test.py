import numpy as np
import pytest
import seqio
import tensorflow as tf

from bpd_jax.data.converter import PackingConverter


def targets(pieces):
    return tf.data.Dataset.from_generator(
        lambda: ({"targets": np.array(piece, np.int32)} for piece in pieces),
        output_signature={"targets": tf.TensorSpec([None], tf.int32)},
    )


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
