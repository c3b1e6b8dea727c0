"""Attention of few queries to the cache on a CPU, which reads each visible slot once.

XLA multiplies the queries with all slots of every row, whether they hold tokens or not.
`benchmarks.row_products` compares passes with and without the kernel.

Every number of the result is summed in the same order, however many queries there are.
"""

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int, Num
from bpd_jax.models.cache import BITS
from bpd_jax.models.cpu.device import on_cpu
from bpd_jax.models.cpu.tile import Tile, tile_of_processor
from bpd_jax.models.quantized import OneOf, operands
from bpd_jax.models.transformer_config import INT8

_STORED = (jnp.float32, jnp.bfloat16, BITS)


def prefix_attention(
    queries: Float[Array, "B K M H"],
    keys: Num[Array, "B K H S"] | OneOf,
    values: Num[Array, "B K S H"] | OneOf,
    lengths: Int[Array, " B"],
    tile: Tile | None = None,
) -> tuple[Array, Array, Array] | None:
    """Attends to the first `lengths[b]` slots of a cache.

    Queries are scaled, and multiplied in float32. Keys and values are float32,
    bfloat16, or the bits of bfloat16 (see `KVCache`). Rows without a visible slot have
    a peak of -inf and else zeros. The tile, whose width divides H, is by default that
    of this processor.

    Returns:
      In float32: the values `[B, K, M, H]` weighted with the exponentials of the scores
      less the greatest one; the greatest score `[B, K, M]` of each query; and the sum
      of its exponentials. None if there is no kernel for this device and these arrays.
    """
    if not reads(keys, values, tile):
        return None
    from bpd_jax.models.cpu.attention_kernel_code import attention_module
    from bpd_jax.models.cpu.xla_kernel import register

    rows = jax.ShapeDtypeStruct(queries.shape[:3], jnp.float32)
    every = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
    tile = tile or tile_of_processor()
    assert tile is not None
    width, half = queries.shape[-1], keys.dtype != jnp.float32
    sizes = (tile.width, tile.outputs, tile.rows, width, int(half))
    name = "_".join(["bpd_jax_prefix_attention", *map(str, sizes)])
    register(name, lambda: attention_module(tile, width, half))
    call = jax.ffi.ffi_call(name, (every, rows, rows))
    plain = queries.astype(jnp.float32), lengths
    mixed, peaks, totals = call(*plain, *operands(keys, values))
    return mixed, peaks, totals


def reads(
    keys: Num[Array, "B K H S"] | OneOf,
    values: Num[Array, "B K S H"] | OneOf,
    tile: Tile | None = None,
) -> bool:
    """Whether this device has a kernel for such a cache."""
    tile = tile or tile_of_processor()
    known = keys.dtype == values.dtype and keys.dtype in _STORED
    return on_cpu() and known and tile is not None and not values.shape[-1] % tile.width


def cache_dtype(dtype: str, width: int) -> str | None:
    """The dtype of the cache on this device; None for that of activations.

    On a CPU, XLA converts a bfloat16 cache to float32 in every pass. With products of
    integers the cache has 16 bits per number too: reading it is most of what a pass of
    many rows, or of long texts, does besides them. `dtype` is one of `PRECISIONS`,
    `width` is H.
    """
    if dtype not in ("bfloat16", INT8) or not on_cpu():
        return None
    tile = tile_of_processor()
    kernel = tile is not None and width % tile.width == 0
    return BITS.__name__ if kernel else "float32"
