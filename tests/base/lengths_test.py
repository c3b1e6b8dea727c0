"""Lengths that texts are padded to: few, and not much longer."""

import itertools

import pytest

from bpd_jax.base.lengths import padded_length


@pytest.mark.parametrize("per_octave, most, growth", [(8, 40, 1.13), (2, 14, 1.51)])
def test_few_lengths_are_compiled(per_octave, most, growth):
    lengths = [padded_length(n, per_octave) for n in range(1, 2049)]
    assert {32, 64, 256, 512, 1024, 2048} <= set(lengths)
    assert lengths == sorted(lengths)
    assert len(set(lengths)) < most
    for length, padded in enumerate(lengths, 1):
        assert length <= padded < max(length * growth, length + 32)
        assert padded_length(padded, per_octave) == padded
    pairs = itertools.pairwise(sorted(set(lengths)))
    assert all(b <= max(growth * a, a + 32) for a, b in pairs)
    assert padded_length(1, per_octave, shortest=64) == 64
