import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.data.permutation import Permutation


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 9))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_number_occurs_once(size, seed, epoch):
    elements = Permutation(size, (seed, epoch))(np.arange(size))
    assert elements.dtype == np.int64
    assert sorted(elements.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [400_000_000, 2**40 + 1])
def test_large_permutation_has_distinct_and_spread_elements(size):
    positions = np.arange(200_000)
    elements = Permutation(size, (1, 0))(positions)
    assert len(np.unique(elements)) == len(positions)
    assert elements.min() >= 0
    assert elements.max() < size
    counts, _ = np.histogram(elements, 100, (0, size))
    # A uniform sample has a mean of 2,000 and a standard deviation of 45.
    assert abs(counts - 2000).max() < 250
    correlation = np.corrcoef(elements[1:], elements[:-1])[0, 1]
    assert abs(correlation) < 0.01
