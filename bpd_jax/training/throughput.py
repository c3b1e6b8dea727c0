"""The highest possible training throughput, from the devices' peak FLOP/s."""

import jax

from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.model_flops import train_flops

# Dense bfloat16 FLOP/s per jax device, from the vendors' data sheets. Keys are prefixes
# of `device_kind`; the longest matching prefix counts.
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
    model: BlockwiseConfig, length: int, drawn: int | None = None
) -> float | None:
    """Tokens per second if all devices ran at their peak; None for unknown devices.

    Args:
      model: sizes of the model.
      length: T, tokens of a row.
      drawn: positions of a row that heads or a block drafter are trained at; None for
        all.
    """
    kind = jax.devices()[0].device_kind
    matching = [name for name in PEAK_FLOPS if kind.startswith(name)]
    if not matching:
        return None
    peak = PEAK_FLOPS[max(matching, key=len)] * jax.device_count()
    return peak * length / train_flops(model, 1, length, drawn)
