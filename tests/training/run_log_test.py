import types

import jax
import pytest

from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.model_flops import train_flops
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.training.run_log import peak_tokens_per_second


@pytest.mark.parametrize(
    "kind, peak", [("TPU v5 lite", 197e12), ("TPU v5p", 459e12), ("cpu", None)]
)
def test_peak_throughput_of_devices(monkeypatch, kind, peak):
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(jax, "devices", lambda: [device] * 4)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    model = BlockwiseConfig(TransformerConfig(100, 2, 16, 64, 4, max_length=32))
    tokens_per_second = peak_tokens_per_second(model, 32)
    expected = None if peak is None else 4 * peak * 32 / train_flops(model, 1, 32)
    assert tokens_per_second == expected
