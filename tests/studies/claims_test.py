"""The rule of claims, and the effects, on records with known answers."""

import numpy as np
import pytest

from bpd_jax.studies.claims import (
    AGREES,
    BY_CONSTRUCTION,
    CONTRARY,
    OPEN,
    Claim,
    Effect,
    between_effect,
    ratio_effect,
    share_effect,
    summary,
    trend_effects,
    verdict,
)

ABOVE, BELOW, AROUND = (2.0, (1.0, 3.0)), (-2.0, (-3.0, -1.0)), (0.1, (-1.0, 1.2))


def claim(*, certain=False):
    return Claim("Table 4", "§7.3", "It gains.", "table4", lambda run: [], certain)


@pytest.mark.parametrize(
    "effects, expected",
    [
        ([ABOVE], AGREES),
        ([BELOW], CONTRARY),
        ([AROUND], OPEN),
        ([ABOVE, ABOVE], AGREES),
        ([ABOVE, AROUND], OPEN),
        ([ABOVE, BELOW, AROUND], CONTRARY),
        ([(5.0, None)], OPEN),
    ],
)
def test_one_rule_judges_all_claims(effects, expected):
    made = [Effect(*each) for each in effects]
    assert verdict(claim(), made) == expected
    assert verdict(claim(certain=True), made) == BY_CONSTRUCTION


def test_unreliable_effects_are_not_judged():
    assert verdict(claim(), [Effect(*BELOW, reliable=False)]) == OPEN


def test_several_effects_are_counted():
    effects = [Effect(*ABOVE, task="SQuAD"), Effect(*BELOW, task="XSum")]
    assert summary(effects) == "−2.0 to +2.0 %, above 0 on 1 of 2, below on XSum"


def test_ratios_and_shares_of_the_same_texts():
    """Twelve texts, each of which gains a tenth: the difference has no noise."""
    calls = np.arange(20.0, 32.0)
    tokens, more = 1.5 * calls, 1.65 * calls
    effect = ratio_effect((more, calls), (tokens, calls))
    assert effect.value == pytest.approx(10)
    assert effect.interval == pytest.approx((10, 10))
    effect = share_effect((more, calls), (tokens, calls))
    assert effect.value == pytest.approx(15)
    assert ratio_effect((more[:3], calls[:3]), (tokens[:3], calls[:3])).interval is None


def test_groups_of_different_texts_vary_independently():
    rng = np.random.default_rng(0)
    high, low = rng.normal(2.0, 0.1, 40), rng.normal(1.0, 0.1, 30)
    effect = between_effect((high, np.ones(40)), (low, np.ones(30)))
    assert effect.value == pytest.approx(100 * (high.mean() / low.mean() - 1))
    assert effect.interval[0] > 80
    shares = between_effect((high, np.ones(40)), (low, np.ones(30)), shares=True)
    assert shares.value == pytest.approx(100 * (high.mean() - low.mean()))


def trend(noise, sign):
    """Eight tasks of 20 texts; the second number falls as the first one rises."""
    rng = np.random.default_rng(1)
    tasks = []
    for level in range(8):
        first = level + noise * rng.normal(size=20)
        second = -level + noise * rng.normal(size=20)
        tasks.append(
            (20, lambda t, x=first: x[t].mean(), lambda t, y=second: y[t].mean())
        )
    [effect] = trend_effects(tasks, sign)
    return effect


def test_trends_over_tasks_use_halves_of_the_texts():
    effect = trend(0.1, -1)
    assert effect.value == pytest.approx(1)
    assert effect.reliable
    assert verdict(claim(), [effect]) == AGREES
    assert verdict(claim(), [trend(0.1, 1)]) == CONTRARY
    noisy = trend(1000, -1)
    assert not noisy.reliable
    assert verdict(claim(), [noisy]) == OPEN


def test_a_shared_denominator_is_no_trend():
    """Gains over a noisy base fall with it, in the same texts but not in halves."""
    rng = np.random.default_rng(2)
    tasks = []
    for _ in range(8):
        base = rng.normal(1.3, 0.3, 24)
        tasks.append(
            (24, lambda t, b=base: b[t].mean(), lambda t, b=base: 1.5 / b[t].mean())
        )
    assert verdict(claim(), trend_effects(tasks, -1)) == OPEN
