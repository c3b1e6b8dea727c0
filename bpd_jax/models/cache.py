"""The key-value cache: an explicit argument and result, with a length per row.

Block decoding accepts a different number of tokens in every row, so all index
arithmetic is per row. A forward pass reads the cache and returns the keys and
values of its own tokens; `commit` writes those that were accepted. Slots past a
row's length hold leftovers that the attention mask hides and the next commit
overwrites.

Worked example (one row, 6 slots, length 3, two of four new slots accepted):

    slots   a b c . . .        length 3
    new     d e x y            counts 2
    after   a b c d e x        length 5; `x` is hidden, `y` fell off the end
"""

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.models.config import TransformerConfig
from bpd_jax.typing import Array, Float, Int


@flax.struct.dataclass
class KeyValues:
    """Keys and values of T tokens in every layer."""

    keys: Float[Array, "layer B T K H"]
    values: Float[Array, "layer B T K H"]


@flax.struct.dataclass
class KVCache:
    """Keys and values of the text so far; row b uses its first `lengths[b]` slots."""

    keys: Float[Array, "layer B S K H"]
    values: Float[Array, "layer B S K H"]
    lengths: Int[Array, " B"]

    @property
    def slots(self) -> int:
        """S, slots per row."""
        return self.keys.shape[2]


def empty_cache(config: TransformerConfig, batch: int, slots: int) -> KVCache:
    """An empty cache.

    `slots` must leave room for one whole block past the longest text, because
    `commit` always writes a whole block.
    """
    shape = (config.num_layers, batch, slots, config.kv_heads, config.head_width)
    return KVCache(
        keys=jnp.zeros(shape, config.dtype),
        values=jnp.zeros(shape, config.dtype),
        lengths=jnp.zeros((batch,), jnp.int32),
    )


def commit(cache: KVCache, new: KeyValues, counts: Int[Array, " B"]) -> KVCache:
    """Appends the first `counts[b]` of T new slots to row b.

    All T slots are written, so `lengths + T` must not pass S for a row that still
    runs; rows whose count is 0 keep their text.
    """
    return KVCache(
        keys=write_rows(cache.keys, new.keys, cache.lengths, batch_axis=1),
        values=write_rows(cache.values, new.values, cache.lengths, batch_axis=1),
        lengths=cache.lengths + counts,
    )


def write_rows(
    buffer: Array, block: Array, starts: Int[Array, " B"], *, batch_axis: int = 0
) -> Array:
    """Writes `block` into `buffer` at `starts[b]` along the axis after the batch.

    A vmapped `dynamic_update_slice`: unlike `.at[rows, slots].set` it needs no
    collective when the batch is sharded, and it updates a donated buffer in place.
    Like every dynamic slice it moves a start back that would write past the end.
    """

    def write_row(row: Array, new: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(
            row, new.astype(row.dtype), start, axis=batch_axis
        )

    in_axes = (batch_axis, batch_axis, 0)
    return jax.vmap(write_row, in_axes=in_axes, out_axes=batch_axis)(
        buffer, block, starts
    )
