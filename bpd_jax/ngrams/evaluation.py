"""Perplexity of n-gram models on texts."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import parallel, trie
from bpd_jax.ngrams.counting import windows
from bpd_jax.ngrams.model import NGramModel

# Number of tokens scored at once.
_BLOCK = 1 << 20


class Evaluation(NamedTuple):
    """The evaluation of a model on a text.

    Attributes:
      events: predicted symbols, one `</s>` per sequence included.
      unknown: number of predicted symbols without a unigram.
      log_prob: natural logarithm of the probability of all other symbols.
    """

    events: int
    unknown: int
    log_prob: float

    @property
    def perplexity(self) -> float:
        """Perplexity per event with a unigram; NaN if there is none."""
        scored = self.events - self.unknown
        try:
            return math.exp(-self.log_prob / scored) if scored else math.nan
        except OverflowError:
            return math.inf


def evaluate(
    models: Sequence[NGramModel], sequences: Iterable[Sequence[int] | np.ndarray]
) -> list[Evaluation]:
    """Scores sequences with several models of one vocabulary, in one pass."""
    offsets = [
        [trie.child_offsets(model.keys, n, model.width) for n in range(model.order)]
        for model in models
    ]

    def score(stream: np.ndarray) -> list[Evaluation]:
        results = []
        for model, model_offsets in zip(models, offsets, strict=True):
            scores = model.stream_log_probs(stream, model_offsets)[stream != model.bos]
            finite = np.isfinite(scores)
            unknown = int(np.count_nonzero(~finite))
            results.append(
                Evaluation(scores.size, unknown, float(scores[finite].sum()))
            )
        return results

    streams = _streams(models[0], sequences)
    blocks = list(parallel.in_order(score, streams, parallel.cores()))
    if not blocks:
        raise UserError("there is no text to score: the input is empty.")
    return [
        Evaluation(*map(sum, zip(*results, strict=True)))
        for results in zip(*blocks, strict=True)
    ]


def _streams(
    model: NGramModel, sequences: Iterable[Sequence[int] | np.ndarray]
) -> Iterator[np.ndarray]:
    """Yields the symbols of about `_BLOCK` tokens at a time, with boundaries."""
    first, size = 1, 0
    block: list[Sequence[int] | np.ndarray] = []

    def stream() -> np.ndarray:
        return windows.add_boundaries(
            windows.join(block),
            vocab_size=model.vocab_size,
            end_of_text=model.end_of_text,
            first=first,
        )

    for sequence in sequences:
        block.append(sequence)
        size += len(sequence)
        if size >= _BLOCK:
            yield stream()
            first, size = first + len(block), 0
            block.clear()
    if block:
        yield stream()
