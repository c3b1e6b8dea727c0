"""Tests of bpd_jax.ngrams.backoff."""

import numpy as np

from bpd_jax.ngrams.backoff import NEVER, log_backoffs

# V = 3; all five unigrams; the bigrams `0 1`, `0 2`, `1 0`, `1 1`, `1 2`, `1 </s>`.
WIDTH = 5
KEYS = (np.arange(5), np.array([1, 2, 5, 6, 7, 8]))
UNIGRAMS = np.array([0.4, 0.3, 0.2, 0.1, 0.0])


def test_weights_distribute_the_remaining_mass():
    bigrams = np.array([0.6, 0.2, 0.1, 0.2, 0.3, 0.4])
    (weights,) = log_backoffs(KEYS, [UNIGRAMS, bigrams], WIDTH)
    # After 0: (1 - 0.6 - 0.2) / (1 - 0.3 - 0.2). All symbols were seen after 1.
    np.testing.assert_allclose(weights, [np.log(0.4), NEVER, 0, 0, 0])
