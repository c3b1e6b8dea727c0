"""Random texts from a back-off model."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.model import NGramModel


class Samples(NamedTuple):
    """Random texts.

    Attributes:
      sequences: the tokens of each, int32, without the end.
      ended: `[B]` bool: whether `</s>` came next; the others were cut at the limit.
    """

    sequences: list[np.ndarray]
    ended: np.ndarray


def sample(
    model: NGramModel,
    rng: np.random.Generator,
    number: int,
    *,
    max_length: int,
    context: Sequence[int] | None = None,
) -> Samples:
    """Draws texts, each token with exactly the probability that the model gives it.

    Back-off is drawn as it is defined. With the probability of its extensions a
    history is followed by one of them; otherwise by a symbol drawn for its suffix, and
    drawn again as long as it is one of the extensions.

    Args:
      model: one that sums to one in every context.
      rng: where chance comes from; the same state gives the same texts.
      number: B, how many texts.
      max_length: most tokens of a text, 1 or more.
      context: the tokens before them, as in `NGramModel.log_prob`; by default the
        beginning of a text.

    Raises:
      UserError: `number` or `max_length` is below 1.
    """
    from bpd_jax.ngrams import sample_kernels

    if number < 1 or max_length < 1:
        raise UserError(
            f"number is {number} and max_length {max_length}: both must be 1 or more."
        )
    keys, width, order = model.keys, model.width, model.order
    offsets = [trie.child_offsets(keys, level, width) for level in range(order)]
    probs = [np.exp(log_prob) for log_prob in model.log_probs]
    tokens = np.full((number, max_length), -1, np.int32)
    lengths = np.empty(number, np.int64)
    sample_kernels.fill_samples(
        _read_only(keys),
        _read_only(offsets),
        _read_only(probs),
        np.cumsum(probs[0]),
        _known_histories(model, [model.bos] if context is None else context),
        width,
        model.eos,
        rng,
        tokens,
        lengths,
    )
    ended = lengths <= max_length
    return Samples(
        [
            row[:length].copy()
            for row, length in zip(tokens, np.minimum(lengths, max_length), strict=True)
        ],
        ended,
    )


def _read_only(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Gives arrays of memory and of files one type, for which loops are compiled."""
    views = tuple(array.view() for array in arrays)
    for view in views:
        view.flags.writeable = False
    return views


def _known_histories(model: NGramModel, context: Sequence[int]) -> np.ndarray:
    """Returns the n-grams of 0, 1, ... N-1 symbols that end the context, or -1."""
    recent = [model.bos if token == model.end_of_text else token for token in context]
    histories = np.full(model.order, -1, np.int64)
    histories[0] = 0
    for length in range(1, min(len(recent), model.order - 1) + 1):
        index = np.zeros(1, np.int64)
        for size, symbol in enumerate(recent[len(recent) - length :]):
            index = trie.find(model.keys[size], index, np.array([symbol]), model.width)
        histories[length] = index[0]
    return histories
