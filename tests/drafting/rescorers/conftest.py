"""Small n-gram models and random lattices."""

import functools
from collections.abc import Callable

import numpy as np
import pytest

from bpd_jax.drafting.lattice import Lattice
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel

VOCAB, END = 8, 0


@functools.cache
def _ngram_model(order: int, end_of_text: int | None, seed: int) -> NGramModel:
    rng = np.random.default_rng(order + 100 * seed)
    # Tokens 6 and 7 are never seen.
    texts = [rng.zipf(1.6, size=30).clip(1, VOCAB - 3) for _ in range(20)]
    counts = count_ngrams(
        [text.astype(np.int32) for text in texts],
        order=order,
        vocab_size=VOCAB,
        end_of_text=end_of_text,
    )
    return estimate_katz(counts)


@pytest.fixture(scope="session")
def ngram_model() -> Callable[..., NGramModel]:
    """Makes a model of a given order over eight tokens; token 0 ends a text."""

    def make(order: int, end_of_text: int | None = END, seed: int = 0) -> NGramModel:
        return _ngram_model(order, end_of_text, seed)

    return make


@pytest.fixture(scope="session")
def random_lattice() -> Callable[..., Lattice]:
    """Makes lattices of distinct candidates; the first position is certain."""

    def make(seed: int, batch: int = 2, length: int = 4, width: int = 3) -> Lattice:
        rng = np.random.default_rng(seed)
        tokens = np.stack(
            [
                [rng.permutation(VOCAB)[:width] for _ in range(length)]
                for _ in range(batch)
            ]
        )
        tokens[:, 0] = tokens[:, 0, :1]
        log_probs = -np.sort(rng.exponential(2, size=(batch, length, width)))
        log_probs[:, 0] = [0] + [-np.inf] * (width - 1)
        return Lattice(
            tokens.astype(np.int32),
            log_probs.astype(np.float32),
            np.zeros((batch, length), np.float32),
        )

    return make
