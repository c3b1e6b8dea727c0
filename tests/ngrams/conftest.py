"""Small corpora and models."""

import numpy as np
import pytest

from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel


@pytest.fixture(scope="session")
def corpus() -> list[np.ndarray]:
    """Sixty sequences over the tokens 0 ... 8 with repeated patterns."""
    rng = np.random.default_rng(7)
    return [
        np.minimum(rng.geometric(0.3, size=rng.integers(0, 12)) - 1, 8)
        for _ in range(60)
    ]


@pytest.fixture(scope="session")
def trigrams(corpus: list[np.ndarray]) -> NGramModel:
    """A trigram model of ten tokens, of which 9 is unseen."""
    return estimate_katz(count_ngrams(corpus, order=3, vocab_size=10))


@pytest.fixture(scope="session")
def document_model(corpus: list[np.ndarray]) -> NGramModel:
    """The same with token 9 as the end-of-text token."""
    counts = count_ngrams(corpus, order=3, vocab_size=10, end_of_text=9)
    return estimate_katz(counts)
