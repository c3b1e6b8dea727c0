"""How many tokens per second the devices could train on, if all was products."""

import jax

from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.flops import train_flops

# Dense bfloat16 products, FLOP/s per device as jax counts devices, from the makers'
# data sheets; by the beginning of `device_kind`, the longer one first.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
}


def peak_tokens_per_second(
    model: BlockwiseConfig, length: int, anchors: int = 0
) -> float | None:
    """Tokens per second at the peak of all devices; None if it is not known."""
    kind = jax.devices()[0].device_kind
    matching = [name for name in PEAK_FLOPS if kind.startswith(name)]
    if not matching:
        return None
    peak = PEAK_FLOPS[max(matching, key=len)] * jax.device_count()
    return peak * length / train_flops(model, 1, length, anchors)
