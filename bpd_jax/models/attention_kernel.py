"""Attention of few queries to the cache on a CPU, which reads each visible slot once.

XLA multiplies the queries with all slots of every row, whether they hold tokens or not.
`benchmarks.row_products` compares passes with and without the kernel.

Every number of the result is summed in the same order, however many queries there are.
"""

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.models.cache import BITS
from bpd_jax.models.kernel_tile import Tile
from bpd_jax.models.row_kernel import tile_of_processor

_STORED = (jnp.float32, jnp.bfloat16, BITS)


def applies(keys: Float[Array, "B K H S"], values: Float[Array, "B K S H"]) -> bool:
    """Whether `prefix_attention` can read this cache."""
    known = keys.dtype == values.dtype and keys.dtype in _STORED
    return known and reads_heads_of(values.shape[-1])


def reads_heads_of(width: int) -> bool:
    """Whether there is a kernel for this device and heads with `width` features."""
    if jax.default_backend() != "cpu":
        return False
    tile = tile_of_processor()
    return tile is not None and width % tile.width == 0


def prefix_attention(
    queries: Float[Array, "B K M H"],
    keys: Float[Array, "B K H S"],
    values: Float[Array, "B K S H"],
    lengths: Int[Array, " B"],
    tile: Tile | None = None,
) -> tuple[Float[Array, "B K M H"], Float[Array, "B K M"], Float[Array, "B K M"]]:
    """Attends to the first `lengths[b]` slots of a cache, where `applies`.

    Args:
      queries: scaled; they are multiplied in float32.
      keys: of the cache: float32, bfloat16, or the bits of bfloat16 (see `KVCache`).
      values: of the cache, in the same dtype.
      lengths: int32; rows without a visible slot have a peak of -inf and else zeros.
      tile: whose width divides H; None for that of this processor.

    Returns:
      In float32: the greatest score of each query, the sum of the exponentials of its
      scores less the greatest, and the values weighted with these exponentials; in the
      order mixed values, peaks, totals.
    """
    tile = tile or tile_of_processor()
    assert tile is not None
    rows = jax.ShapeDtypeStruct(queries.shape[:3], jnp.float32)
    every = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
    name = _register(tile, queries.shape[-1], keys.dtype != jnp.float32)
    call = jax.ffi.ffi_call(name, (every, rows, rows))
    mixed, peaks, totals = call(queries.astype(jnp.float32), keys, values, lengths)
    return mixed, peaks, totals


def _register(tile: Tile, width: int, half: bool) -> str:
    """Registers a kernel with XLA, and returns its name there."""
    from bpd_jax.models.attention_kernel_code import attention_module
    from bpd_jax.models.xla_kernel import register

    sizes = (tile.width, tile.outputs, tile.rows, width, int(half))
    name = "bpd_jax_prefix_attention_" + "_".join(map(str, sizes))
    register(name, lambda: attention_module(tile, width, half))
    return name
