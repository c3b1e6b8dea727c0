import dataclasses
import types

import numpy as np
import pytest

from bpd_jax.decoding.method_text import parse_method
from bpd_jax.evaluation.compare import MethodResult
from bpd_jax.evaluation.equality import (
    Difference,
    Divergence,
    differences,
    divergence,
)


@dataclasses.dataclass(frozen=True)
class FlatModel:
    """A model whose two best tokens, 2 and 3, are `gap` apart everywhere."""

    gap: float
    dtype: str = "float32"

    @property
    def config(self):
        return types.SimpleNamespace(trunk=types.SimpleNamespace(dtype=self.dtype))

    def forward(self, tokens, positions, mask, cache=None):
        return np.zeros((*tokens.shape, 1)), None

    def next_token_logits(self, hidden):
        return np.array([0.0, -1.0, 5.0, 5.0 - self.gap])


@pytest.mark.parametrize(
    "gap, dtype, near",
    [
        (1e-6, "float32", True),
        (0.01, "float32", False),
        (0.01, "float16", True),
        (0.1, "float16", False),
        (0.1, "bfloat16", True),
        (0.5, "bfloat16", False),
    ],
)
def test_differences_and_near_ties_are_distinguished(make_generation, gap, dtype, near):
    """The limit of near ties depends on the precision of the model."""
    reference = [make_generation([0, 2, 1]), make_generation([0, 2, 1])]
    outputs = [make_generation([0, 2, 1]), make_generation([0, 3, 1])]
    [difference] = differences(FlatModel(gap, dtype), reference, outputs)
    assert (difference.prompt_index, difference.position) == (1, 1)
    assert difference.gap == pytest.approx(gap)
    assert difference.near_tie is near
    result = MethodResult(parse_method("bpd"), "BPD", outputs, [difference])
    assert result.errors == ([] if near else [difference])


@pytest.mark.parametrize("wanted, got", [(2, 1), (1, 2), (3, 0)])
def test_tie_of_other_tokens_is_not_a_near_tie(make_generation, wanted, got):
    texts = [make_generation([2, wanted])], [make_generation([2, got])]
    [difference] = differences(FlatModel(0.0), *texts)
    assert difference.gap == (6.0 if 1 in (wanted, got) else 5.0)
    assert not difference.near_tie


def test_text_that_stops_early_is_not_a_near_tie(make_generation):
    texts = [make_generation([2, 3])], [make_generation([2])]
    for reference, outputs in (texts, texts[::-1]):
        text_differences = differences(FlatModel(0.0), reference, outputs)
        assert text_differences == [Difference(0, 1, float("inf"), False)]
        assert divergence(text_differences, 1) == Divergence(
            rate=1.0, first=2, gap=None
        )


def test_divergence_summarises_differences():
    text_differences = [
        Difference(0, 11, 0.25, False),
        Difference(3, 4, 0.0, True),
        Difference(2, 30, 0.125, True),
    ]
    assert divergence(text_differences, 4) == Divergence(rate=0.75, first=5, gap=0.125)
    assert divergence([], 4) == Divergence(0.0, None, None)
