import numpy as np
import pytest

from bpd_jax.evaluation.efficiency import (
    block_efficiency,
    bootstrap_interval,
    paired_interval,
)


@pytest.fixture
def texts(make_generation):
    """Makes texts of 40 tokens from their numbers of serial calls."""
    return lambda calls: [make_generation([1] * 40, n) for n in calls]


def test_block_efficiency_is_a_ratio_of_sums(make_generation):
    texts = [make_generation([1] * 8, 2), make_generation([1] * 2, 2)]
    assert block_efficiency(texts) == 10 / 4
    low, high = bootstrap_interval(texts)
    assert low == 1.0
    assert high == 4.0
    assert bootstrap_interval([texts[0]] * 5) == (4.0, 4.0)


def test_a_method_gains_nothing_over_itself(texts):
    assert paired_interval(texts([5, 40, 20]), texts([5, 40, 20])) == (0.0, 0.0)


def test_twice_as_good_on_every_prompt_is_twice_as_good_in_every_resample(texts):
    assert paired_interval(texts([5, 20, 10]), texts([10, 40, 20])) == (1.0, 1.0)


def test_pairs_are_narrower_than_either_method_alone(texts):
    """What is hard for one method is hard for the other: a quarter fewer calls."""
    calls = np.random.default_rng(0).integers(8, 40, size=30)
    method, base = texts(np.ceil(0.75 * calls).astype(int)), texts(calls)
    low, high = paired_interval(method, base)
    gain = block_efficiency(method) / block_efficiency(base) - 1
    assert 0 < low < gain < high
    # The same from the two intervals, as if prompts had nothing to do with it.
    (low_m, high_m), (low_b, high_b) = map(bootstrap_interval, (method, base))
    assert high - low < 0.2 * (high_m / low_b - low_m / high_b)
    assert paired_interval(method, base, level=0.5)[0] > low
