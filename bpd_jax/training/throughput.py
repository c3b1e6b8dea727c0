"""How many tokens per second the devices could train on, if all was products."""

import jax
import numpy as np

from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.config import BlockwiseConfig

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


def flops_per_token(model: BlockwiseConfig, length: int) -> float:
    """FLOPs that training needs per token, forward and backward.

    6 per parameter that is multiplied with, and 12 · layers · N · H · T for attention
    (Chowdhery et al. 2022, appendix B: recomputation is not counted, the masked half of
    attention is). The softmax is multiplied with once for each head.
    """
    multiplied = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameter_shapes(model)):
        names = [entry.key for entry in path]
        if names[-1].startswith("kernel"):
            multiplied += int(np.prod(leaf.shape))
    trunk = model.trunk
    multiplied += model.block_size * trunk.d_model * trunk.vocab_size
    width = trunk.num_heads * trunk.head_width
    return 6.0 * multiplied + 12.0 * trunk.num_layers * width * length


def peak_tokens_per_second(model: BlockwiseConfig, length: int) -> float | None:
    """Tokens per second at the peak of all devices; None if it is not known."""
    kind = jax.devices()[0].device_kind
    found = [name for name in PEAK_FLOPS if kind.startswith(name)]
    if not found:
        return None
    peak = PEAK_FLOPS[max(found, key=len)] * jax.device_count()
    return peak / flops_per_token(model, length)
