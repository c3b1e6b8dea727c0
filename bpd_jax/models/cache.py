"""The key-value cache, an explicit argument and result, with a length per row.

Block decoding accepts a different number of tokens in every row, so rows have separate
lengths. A forward pass reads the cache and returns the keys and values of its own
tokens; `commit` writes those of accepted tokens. Slots after the length of a row have
arbitrary values, which the attention mask hides and the next commit overwrites.

Worked example (one row, 6 slots, length 3, two of four new slots accepted):

    slots   a b c . . .        length 3
    new     d e x y            counts 2
    after   a b c d e x        length 5; `x` is hidden, `y` is beyond the last slot
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Float, Int, Num, PyTree
from bpd_jax.models.partitioning import BATCH_SPEC, constrain, heads_spec
from bpd_jax.models.transformer_config import TransformerConfig

# The dtype of a cache that stores the bits of bfloat16 numbers: on a CPU, XLA converts
# a complete bfloat16 array to float32 and back to write a few slots.
BITS = jnp.uint16


@flax.struct.dataclass
class KeyValues:
    """Keys and values of T tokens in every layer."""

    keys: Float[Array, "layer B T K H"]
    values: Float[Array, "layer B T K H"]


@flax.struct.dataclass
class KVCache:
    """Keys and values of the text; row b uses its first `lengths[b]` slots.

    Each layer has its own arrays, in the layout of the operands of batched matrix
    products, because passes over few tokens are limited by memory bandwidth and slices
    or transposes would copy them.
    """

    keys: tuple[Num[Array, "B K H S"], ...]
    values: tuple[Num[Array, "B K S H"], ...]
    lengths: Int[Array, " B"]

    @property
    def slots(self) -> int:
        """S, number of slots per row."""
        return self.values[0].shape[2]

    def of_layer(self, layer: int) -> "KVCache":
        return KVCache((self.keys[layer],), (self.values[layer],), self.lengths)


def empty_cache(
    config: TransformerConfig, batch: int, slots: int, dtype: str | None = None
) -> KVCache:
    """An empty cache, by default in the dtype of activations.

    `slots` must exceed the length of the longest text by a complete block, because
    `commit` always writes a complete block.
    """
    heads, width = config.kv_heads, config.head_width
    dtype = dtype or config.dtype

    def zeros(*shape: int) -> tuple[Array, ...]:
        layers = range(config.num_layers)
        return tuple(jnp.zeros((batch, heads, *shape), dtype) for _ in layers)

    return KVCache(
        keys=zeros(width, slots),
        values=zeros(slots, width),
        lengths=jnp.zeros((batch,), jnp.int32),
    )


def row_specs(tree: PyTree, mesh: Mesh | None) -> Any:
    """The specs of arrays `[B, …]`: of rows, and of the heads of each `KVCache`."""

    def of_node(node: Any) -> Any:
        if not isinstance(node, KVCache):
            return BATCH_SPEC
        heads = heads_spec(node.values[0].shape[1], mesh) if node.values else BATCH_SPEC
        return jax.tree.map(lambda x: BATCH_SPEC if x.ndim == 1 else heads, node)

    return jax.tree.map(of_node, tree, is_leaf=lambda x: isinstance(x, KVCache))


def spread(cache: KVCache, mesh: Mesh | None) -> KVCache:
    """The cache in jitted code, its rows and heads spread over a mesh."""
    specs = row_specs(cache, mesh)
    return jax.tree.map(lambda x, spec: constrain(x, mesh, spec), cache, specs)


def grow(cache: KVCache, slots: int) -> KVCache:
    """Returns the cache with `slots` more slots per row."""
    none, more = (0, 0), (0, slots)
    return KVCache(
        keys=tuple(jnp.pad(x, (none, none, none, more)) for x in cache.keys),
        values=tuple(jnp.pad(x, (none, none, more, none)) for x in cache.values),
        lengths=cache.lengths,
    )


def commit(cache: KVCache, new: KeyValues, counts: Int[Array, " B"]) -> KVCache:
    """Appends the first `counts[b]` of T new tokens to row b.

    All T slots are written, so `lengths + T` must not exceed S in rows that are not
    finished; rows whose count is 0 keep their text.
    """
    starts = cache.lengths
    return KVCache(
        keys=tuple(
            write_rows(buffer, new.keys[layer].transpose(0, 2, 3, 1), starts, axis=3)
            for layer, buffer in enumerate(cache.keys)
        ),
        values=tuple(
            write_rows(buffer, new.values[layer].swapaxes(1, 2), starts, axis=2)
            for layer, buffer in enumerate(cache.values)
        ),
        lengths=cache.lengths + counts,
    )


def numbers(cached: Array) -> Array:
    """Converts keys or values of the cache to floating-point numbers."""
    if cached.dtype == BITS:
        return jax.lax.bitcast_convert_type(cached, jnp.bfloat16)
    return cached


def write_rows(
    buffer: Array, block: Array, starts: Int[Array, " B"], *, axis: int = 1
) -> Array:
    """Writes `block[b]` into `buffer[b]` at `starts[b]` along `axis`.

    A vmapped `dynamic_update_slice`: unlike `.at[rows, slots].set`, it needs no
    collectives for a sharded batch, and updates a donated buffer in place. Like every
    dynamic slice, it clamps starts so that the block fits.
    """

    def write_row(row: Array, new: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, new, start, axis=axis - 1)

    if buffer.dtype == BITS and block.dtype != BITS:
        block = jax.lax.bitcast_convert_type(block.astype(jnp.bfloat16), BITS)
    block = block.astype(buffer.dtype)
    return jax.vmap(write_row)(buffer, block, starts)
