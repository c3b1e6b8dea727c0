"""Attention of few tokens on a CPU, to the cache and to each other.

XLA multiplies the queries with all slots of every row, whether they hold tokens or not;
the kernel reads each visible slot once.

A token's keys are those of new tokens in the pass over a draft, and slots of the cache
in a pass over a later token. Both are multiplied and added in the same way, one after
the other as the text has them, so that results are the same bits whether a token is
decoded alone or verified as a part of a draft.
"""

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int, Num
from bpd_jax.cpu.device import kernel_name
from bpd_jax.cpu.operands import OneOf, operands
from bpd_jax.cpu.tile import Tile, tile_of_processor
from bpd_jax.models.cache import BITS
from bpd_jax.models.transformer_config import INT8

_STORED = (jnp.float32, jnp.bfloat16, BITS)


def ordered_attention(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B U K H"],
    values: Float[Array, "B U K H"],
    mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"],
    prefix_keys: Num[Array, "B K H S"] | OneOf,
    prefix_values: Num[Array, "B K S H"] | OneOf,
    lengths: Int[Array, " B"],
    first: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
    tile: Tile | None = None,
) -> Float[Array, "B T N H"]:
    """Attends as `attention`, to the first `lengths[b]` slots and to visible new keys.

    Products and sums are in float32. The tile, whose width divides H, is by default
    that of this processor.

    Args:
      queries: not scaled yet; the result has their dtype.
      keys: of new tokens; a token comes after all new ones that it sees.
      mask: which new keys a token sees, itself among them.
      prefix_keys: of the cache: float32, bfloat16, or the bits of bfloat16 (see
        `KVCache`); new keys and values are rounded as they will be in the cache.
      first: the first slot that a token sees, int32; None for slot 0.
    """
    from bpd_jax.cpu.attention_kernel_code import attention_module
    from bpd_jax.cpu.xla_kernel import register

    tile = tile or tile_of_processor()
    assert tile is not None
    batch, length, num_heads, width = queries.shape
    heads = keys.shape[2]
    group = num_heads // heads
    dtype = queries.dtype
    queries, keys, values = (x.astype(jnp.float32) for x in (queries, keys, values))
    if mask.ndim == 4:  # Drafts side by side do not see each other.
        alone = jnp.eye(mask.shape[1], dtype=bool)[:, None, :, None]
        mask = (mask[:, :, :, None] & alone).reshape(batch, length, -1)
    folded = queries.reshape(batch, length, heads, group, width).swapaxes(1, 2)
    folded = folded.reshape(batch, heads, -1, width) * width**-0.5
    starts = jnp.zeros((batch, length), jnp.int32) if first is None else first
    half = prefix_keys.dtype != jnp.float32
    if half:
        # A conversion there and back would be removed by XLA.
        keys, values = (jax.lax.reduce_precision(x, 8, 7) for x in (keys, values))
    sizes = (tile.width, tile.outputs, tile.rows, width, softcap or 0.0, int(half))
    name = kernel_name("attention", *sizes)
    register(name, lambda: attention_module(tile, width, softcap, half))
    result = jax.ShapeDtypeStruct(folded.shape, jnp.float32)
    mixed = jax.ffi.ffi_call(name, result)(
        folded,
        keys.transpose(0, 2, 3, 1),
        values.swapaxes(1, 2),
        jnp.repeat(mask.astype(jnp.int8), group, axis=1),
        lengths,
        jnp.repeat(starts, group, axis=1),
        *operands(prefix_keys, prefix_values),
    )
    mixed = mixed.reshape(batch, heads, length, group, width).swapaxes(1, 2)
    return mixed.reshape(batch, length, num_heads, width).astype(dtype)


def reads(
    keys: Num[Array, "B K H S"] | OneOf,
    values: Num[Array, "B K S H"] | OneOf,
    tile: Tile | None = None,
) -> bool:
    """Whether this device has a kernel for such a cache."""
    tile = tile or tile_of_processor()
    known = keys.dtype == values.dtype and keys.dtype in _STORED
    return known and tile is not None and not values.shape[-1] % tile.width


def cache_dtype(precision: str, width: int) -> str | None:
    """The dtype of the cache on this device; None for that of activations.

    On a CPU, XLA converts a bfloat16 cache to float32 in every pass. With products of
    integers the cache has 16 bits per number too: reading it is most of what a pass of
    many rows, or of long texts, does besides them. `precision` is one of `PRECISIONS`,
    `width` is H.
    """
    if precision not in ("bfloat16", INT8):
        return None
    tile = tile_of_processor()
    kernel = tile is not None and width % tile.width == 0
    return BITS.__name__ if kernel else "float32"
