"""Packing as a seqio converter."""

import itertools
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from bpd_jax.data.packing import pack
from bpd_jax.data.quiet import seqio, tf
from bpd_jax.data.rows import make_batch

_BLOCK = 256

_INTEGERS = seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)


class PackingConverter(seqio.FeatureConverter):
    """Turns the feature `targets` into packed rows with the fields of `rows.Batch`.

    seqio's own packing tells padding from tokens by id 0, and so loses every real
    token of id 0. Here the segment id alone marks padding.
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
