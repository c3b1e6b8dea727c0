"""Packing pieces of documents into rows of one length, as a seqio converter."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import numpy as np

from bpd_jax.data.quiet import seqio, tf
from bpd_jax.data.rows import make_batch

# Rows that wait for pieces to fill them. More waste less and cost more time.
_OPEN_ROWS = 64

_BLOCK = 256


def pack(
    pieces: Iterable[np.ndarray], length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Packs pieces into rows: each goes where it leaves the least room (best fit).

    A row is given out when it is full; when a piece fits nowhere and enough rows
    wait, the fullest one is given out with padding at its end. Length 4:

        pieces       1 2 3 | 4 5 6 7 | 8
        tokens       4 5 6 7,  1 2 3 8
        segment_ids  1 1 1 1,  1 1 1 2

    Args:
      pieces: `[n]` ids with 1 ≤ n ≤ length; every id is a token, 0 too.
      length: tokens of a row, T.

    Yields:
      tokens `[T]` int32 and segment_ids `[T]` int32 (1, 2, ...; 0 is padding).
    """
    waiting: list[list[np.ndarray]] = []
    room: list[int] = []  # Free positions of each waiting row.
    for piece in pieces:
        fitting = [i for i, free in enumerate(room) if free >= len(piece)]
        if fitting:
            best = min(fitting, key=room.__getitem__)
            waiting[best].append(piece)
            room[best] -= len(piece)
        else:
            if len(waiting) == _OPEN_ROWS:
                fullest = room.index(min(room))
                room.pop(fullest)
                yield _row(waiting.pop(fullest), length)
            waiting.append([piece])
            room.append(length - len(piece))
            best = len(room) - 1
        if room[best] == 0:
            room.pop(best)
            yield _row(waiting.pop(best), length)
    for row in waiting:
        yield _row(row, length)


def _row(pieces: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros(length, np.int32)
    segment_ids = np.zeros(length, np.int32)
    start = 0
    for number, piece in enumerate(pieces, start=1):
        end = start + len(piece)
        tokens[start:end] = piece
        segment_ids[start:end] = number
        start = end
    return tokens, segment_ids


_INTEGERS = seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)


class PackingConverter(seqio.FeatureConverter):
    """Turns the feature `targets` into packed rows with the fields of `rows.Batch`.

    seqio's own packing tells padding from tokens by id 0, and so loses every real
    token of id 0. Here padding is told by segment id alone.
    """

    TASK_FEATURES: ClassVar = {"targets": _INTEGERS}
    MODEL_FEATURES: ClassVar = {
        "tokens": _INTEGERS,
        "segment_ids": _INTEGERS,
        "positions": _INTEGERS,
        "loss_mask": seqio.FeatureConverter.FeatureSpec(dtype=tf.bool),
    }
    # What packing adds is in MODEL_FEATURES already.
    PACKING_FEATURE_DTYPES: ClassVar[dict[str, tf.DType]] = {}

    def get_model_feature_lengths(
        self, task_feature_lengths: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Every field is as long as `targets`."""
        return dict.fromkeys(self.MODEL_FEATURES, task_feature_lengths["targets"])

    def _convert_features(
        self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
    ) -> tf.data.Dataset:
        length = task_feature_lengths["targets"]

        def read() -> Iterator[dict[str, np.ndarray]]:
            pieces = (example["targets"] for example in ds.as_numpy_iterator())
            rows = pack(pieces, length)
            # Each step of a generator costs a millisecond, so rows come in blocks.
            while block := list(itertools.islice(rows, _BLOCK)):
                tokens, segment_ids = zip(*block, strict=True)
                yield make_batch(np.stack(tokens), np.stack(segment_ids))._asdict()

        blocks = tf.data.Dataset.from_generator(
            read,
            output_signature={
                name: tf.TensorSpec([None, length], spec.dtype)
                for name, spec in self.MODEL_FEATURES.items()
            },
        )
        return blocks.unbatch()
