"""The share of the oracle's headroom."""

import pytest

from bpd_jax.evaluation.headroom import headroom_taken


def test_a_quarter_of_the_way():
    assert headroom_taken(1.75, base=1.5, oracle=2.5) == 0.25
    assert headroom_taken(2.5, base=1.5, oracle=2.5) == 1
    assert headroom_taken(1.0, base=1.5, oracle=2.5) == -0.5


def test_newsroom_of_the_paper():
    """16-best 4-gram 1.31, BPD 1.08, oracle 1.50: 0.23 of 0.42."""
    assert headroom_taken(1.31, 1.08, 1.50) == pytest.approx(0.23 / 0.42)


@pytest.mark.parametrize("oracle", [1.5, 1.4])
def test_without_headroom_there_is_no_share(oracle):
    assert headroom_taken(1.5, base=1.5, oracle=oracle) is None
