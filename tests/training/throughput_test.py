import types

import jax
import pytest

from bpd_jax.models.config import BlockHeadsConfig, BlockwiseConfig, TransformerConfig
from bpd_jax.training.throughput import flops_per_token, peak_tokens_per_second

TRUNK = TransformerConfig(100, 2, 16, 64, 4, max_length=32)


def test_flops_are_those_of_all_products():
    # Per layer 4 · 16² in attention and 2 · 16 · 64; the softmax is 16 · 100.
    layers = 2 * (4 * 256 + 2048)
    attention = 12 * 2 * 16 * 32
    plain = 6 * (layers + 1600) + attention
    assert flops_per_token(BlockwiseConfig(TRUNK), 32) == plain
    # Two heads more: two feed-forward layers, two products with the softmax.
    heads = BlockwiseConfig(TRUNK, BlockHeadsConfig(3, 8))
    assert flops_per_token(heads, 32) == plain + 6 * 2 * (2 * 16 * 8 + 1600)


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("cpu", None),
    ],
)
def test_the_peak_is_that_of_the_devices(monkeypatch, kind, peak):
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(jax, "devices", lambda: [device] * 4)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    model = BlockwiseConfig(TRUNK)
    found = peak_tokens_per_second(model, 32)
    assert found == (None if peak is None else 4 * peak / flops_per_token(model, 32))
