import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.drafting.refiners.adaptive import cache_counts, mixed


@pytest.mark.parametrize("seed", range(4))
def test_bigrams_of_the_text_are_counted(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 4, (3, 24)).astype(np.int32)
    lengths = np.array([23, 9, 1], np.int32)
    candidates = rng.integers(0, 5, (3, 4, 3)).astype(np.int32)
    candidates[:, 0] = candidates[:, 0, :1]
    cached_counts = np.asarray(jax.jit(cache_counts)(candidates, tokens, lengths))
    for row, level, previous in np.ndindex(3, 3, 3):
        text = [*tokens[row, : lengths[row]].tolist(), int(candidates[row, 0, 0])]
        pairs = list(itertools.pairwise(text))
        token = int(candidates[row, level, previous])
        counts = [pairs.count((token, int(w))) for w in candidates[row, level + 1]]
        want = [*counts, text[:-1].count(token)]
        assert cached_counts[row, level, previous].tolist() == want
    assert cached_counts.max() > 1


def test_counts_are_mixed_by_the_formula():
    rng = np.random.default_rng(0)
    log_probs = -rng.exponential(3, (2, 3, 4, 5))
    pairs = rng.integers(0, 3, (2, 3, 4, 5))
    totals = pairs.sum(-1) + rng.integers(0, 2, (2, 3, 4))
    counts = np.concatenate([pairs, totals[..., None]], -1).astype(np.float32)
    trust = totals / (totals + 1)
    share = pairs / np.maximum(totals, 1)[..., None]
    want = np.log((1 - trust[..., None]) * np.exp(log_probs) + trust[..., None] * share)
    result = mixed(jnp.asarray(log_probs, jnp.float32), jnp.asarray(counts))
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)


def test_mixture_of_improbable_tokens_is_finite():
    log_probs = jnp.full((1, 1, 1, 2), -1000.0)
    result = mixed(log_probs, jnp.array([[[[0.0, 3.0, 3.0]]]]))
    np.testing.assert_allclose(
        result, [[[[-1000 - np.log(4), np.log(0.75)]]]], rtol=1e-6
    )
    untouched = mixed(log_probs, jnp.zeros((1, 1, 1, 3)))
    np.testing.assert_allclose(untouched, log_probs, rtol=1e-6)
    impossible = mixed(
        jnp.full((1, 1, 1, 2), -jnp.inf), jnp.array([[[[0.0, 1.0, 1.0]]]])
    )
    np.testing.assert_allclose(impossible, [[[[-np.inf, np.log(0.5)]]]], rtol=1e-6)
