"""An adapter from `Tokenizer` to seqio's vocabularies."""

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from bpd_jax.data.quiet_tensorflow import seqio, tf
from bpd_jax.data.tokenizer import Tokenizer


class TokenizerVocabulary(seqio.Vocabulary):
    """A seqio vocabulary whose tokenizer is loaded when it is first used.

    seqio treats id 0 as padding. Here 0 is an ordinary token ('!' in GPT-3's
    vocabulary), and padding is never inferred from ids: decoding stops at the
    end-of-text token, and rows have segment ids (`packing`).
    """

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        super().__init__()
        self._load = load

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self._load()

    @property
    def bos_id(self) -> int:
        """Id of the end-of-text token, which also begins a document."""
        return self.tokenizer.end_of_text

    @property
    def eos_id(self) -> int:
        """Id of the end-of-text token."""
        return self.tokenizer.end_of_text

    @property
    def unk_id(self) -> None:
        """None, because every text can be encoded."""
        return None

    @property
    def _base_vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def _encode(self, s: str) -> Sequence[int]:
        return self.tokenizer.encode(s)

    def _decode(self, ids: Sequence[int]) -> str:
        end = self.eos_id
        return self.tokenizer.decode(itertools.takewhile(lambda id: id != end, ids))

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        """Encodes one text to `[tokens]`, or `[B]` texts to ragged `[B, tokens]`."""

        def encode(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            ids = self.tokenizer.encode_batch([text.decode("utf-8") for text in texts])
            lengths = np.array([len(row) for row in ids], np.int64)
            flat = np.concatenate([np.array(row, np.int32) for row in ids])
            return flat, lengths

        s = tf.convert_to_tensor(s)
        texts = tf.reshape(s, [-1])
        flat, lengths = tf.numpy_function(encode, [texts], [tf.int32, tf.int64])
        flat.set_shape([None])
        lengths.set_shape([None])
        if s.shape.rank == 0:
            return flat
        return tf.RaggedTensor.from_row_lengths(flat, lengths)

    def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the texts of `[..., T]` ids."""

        def decode(rows: np.ndarray) -> np.ndarray:
            texts = np.empty(rows.shape[:-1], object)
            for index in np.ndindex(texts.shape):
                texts[index] = self._decode(rows[index].tolist()).encode("utf-8")
            return texts

        text = tf.numpy_function(decode, [ids], tf.string)
        text.set_shape(ids.shape[:-1])
        return text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenizerVocabulary) and (
            self._load is other._load
            or self.tokenizer.to_json() == other.tokenizer.to_json()
        )

    def __hash__(self) -> int:
        return hash((self.vocab_size, self.eos_id))
