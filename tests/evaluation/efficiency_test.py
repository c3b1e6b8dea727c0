import numpy as np
import pytest

from bpd_jax.evaluation.efficiency import (
    best_alpha,
    block_efficiency,
    bootstrap_interval,
    difference_interval,
    headroom_taken,
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


def test_paired_interval_is_narrower_than_either_method_alone(texts):
    """The refined method needs a quarter fewer calls on every prompt."""
    calls = np.random.default_rng(0).integers(8, 40, size=30)
    method, base = texts(np.ceil(0.75 * calls).astype(int)), texts(calls)
    low, high = paired_interval(method, base)
    gain = block_efficiency(method) / block_efficiency(base) - 1
    assert 0 < low < gain < high
    # The interval for unpaired prompts, computed from the two intervals.
    (low_m, high_m), (low_b, high_b) = map(bootstrap_interval, (method, base))
    assert high - low < 0.2 * (high_m / low_b - low_m / high_b)


def test_interval_of_a_difference_of_two_examples():
    """1 of 2 and 0 of 1 cases, against 0 of 1 and 1 of 1.

    The first example twice gives 2 / 4 - 0 / 2 = 1/2, both 1 / 3 - 1 / 2 = -1/6, the
    second twice 0 / 2 - 2 / 2 = -1; half of the resamples are of both.
    """
    shares = [np.array(values) for values in ([1, 0], [2, 1], [0, 1], [1, 1])]
    assert difference_interval(*shares) == (-1, 0.5)


def test_resamples_without_cases_are_omitted():
    """The second example alone has no case of the first share."""
    shares = [np.array(values) for values in ([1, 0], [2, 0], [0, 1], [1, 1])]
    assert difference_interval(*shares) == (0, 0.5)
    no_cases = np.zeros(2)
    assert difference_interval(no_cases, no_cases, *shares[2:]) is None
    assert difference_interval(*[np.zeros(0)] * 4) is None


@pytest.mark.parametrize(
    "efficiencies, alpha",
    [
        ({0.1: 1.67, 1.0: 2.0, 5.0: 2.04}, 5.0),
        # Of equal ones the nearest to 1 counts, and of two of these the smaller one.
        (dict.fromkeys((0.1, 0.75, 10.0), 2.0), 0.75),
        (dict.fromkeys((0.9, 1.1), 2.0), 0.9),
    ],
)
def test_alpha_of_the_highest_efficiency_is_chosen(efficiencies, alpha):
    assert best_alpha(efficiencies) == alpha


def test_fraction_of_the_headroom():
    assert headroom_taken(1.0, base=1.5, oracle=2.5) == -0.5
    # NewsRoom of the paper: 16-best 4-gram 1.31, BPD 1.08, oracle 1.50.
    assert headroom_taken(1.31, 1.08, 1.50) == pytest.approx(0.23 / 0.42)
    assert headroom_taken(1.5, base=1.5, oracle=1.5) is None
