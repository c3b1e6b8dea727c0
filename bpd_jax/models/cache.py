"""The key-value cache, an explicit argument and result, with a length per row.

Block decoding accepts a different number of tokens in every row, so rows have separate
lengths. A forward pass reads the cache and returns the keys and values of its own
tokens; `commit` writes those of accepted tokens. Slots after the length of a row have
arbitrary values, which the attention mask hides and the next commit overwrites.

Worked example (one row, 6 slots, length 3, two of four new slots accepted):

    slots   a b c . . .        length 3
    new     d e x y            counts 2
    after   a b c d e x        length 5; `x` is hidden, `y` is beyond the last slot

A block drafter has the keys and values of the last S accepted tokens of a row. Its
cache is a `KVCache` that is used as a ring buffer: the token at position p of the text
is in slot p mod S, and `lengths` counts all accepted tokens, possibly more than S.
Rotary positions are part of the keys, so attention does not depend on the order of the
slots. The visible slots are always the first min(lengths, S). `append` writes them:

    slots   a b c d    length 4
    new     e f g      counts 2
    after   e f c d    length 6; the context is c d e f
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from bpd_jax.base.typing import Array, Bool, Float, Int, Num, PyTree
from bpd_jax.models.partitioning import BATCH_SPEC, constrain, heads_spec
from bpd_jax.models.stacks import InStack
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

    The arrays have the layout of the operands of batched matrix products, because
    passes over few tokens are limited by memory bandwidth and slices or transposes
    would copy them. Each layer has its own arrays, `[B, K, H, S]` and `[B, K, S, H]`;
    those of a model whose layers are stacked are one, `[B, layer, K, H, S]`.
    """

    keys: tuple[Num[Array, "B K H S"] | Num[Array, "B layer K H S"], ...]
    values: tuple[Num[Array, "B K S H"] | Num[Array, "B layer K S H"], ...]
    lengths: Int[Array, " B"]

    @property
    def slots(self) -> int:
        """S, number of slots per row."""
        return self.values[0].shape[-2]

    @property
    def is_stacked(self) -> bool:
        """Whether one array holds all layers."""
        return bool(self.keys) and self.keys[0].ndim == 5

    def of_layer(self, layer: int | Int[Array, ""]) -> "KVCache":
        """The cache of one layer; its number is dynamic in a loop over layers."""

        def one(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
            if self.is_stacked:
                return (InStack(arrays[0], layer, axis=1),)
            assert isinstance(layer, int)
            return (arrays[layer],)

        return KVCache(one(self.keys), one(self.values), self.lengths)


def empty_cache(
    config: TransformerConfig,
    batch: int,
    slots: int,
    dtype: str | None = None,
    *,
    stacked: bool = False,
) -> KVCache:
    """An empty cache, by default in the dtype of activations.

    `slots` must exceed the length of the longest text by a complete block, because
    `commit` always writes a complete block.
    """
    heads, width = config.kv_heads, config.head_width
    dtype = dtype or config.dtype

    def zeros(*shape: int) -> tuple[Array, ...]:
        layers = config.num_layers
        if stacked:
            return (jnp.zeros((batch, layers, heads, *shape), dtype),)
        return tuple(jnp.zeros((batch, heads, *shape), dtype) for _ in range(layers))

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
        heads = BATCH_SPEC
        if node.values:
            heads = heads_spec(node.values[0].shape[-3], mesh)
        if node.is_stacked:
            heads = PartitionSpec(heads[0], None, *heads[1:])
        return jax.tree.map(lambda x: BATCH_SPEC if x.ndim == 1 else heads, node)

    return jax.tree.map(of_node, tree, is_leaf=lambda x: isinstance(x, KVCache))


def spread(cache: KVCache, mesh: Mesh | None) -> KVCache:
    """The cache in jitted code, its rows and heads spread over a mesh."""
    specs = row_specs(cache, mesh)
    return jax.tree.map(lambda x, spec: constrain(x, mesh, spec), cache, specs)


def grow(cache: KVCache, slots: int) -> KVCache:
    """Returns the cache with `slots` more slots per row."""
    none, more = (0, 0), (0, slots)

    def grown(arrays: tuple[Array, ...], *ends: tuple[int, int]) -> tuple[Array, ...]:
        return tuple(jnp.pad(x, (none,) * (x.ndim - 2) + ends) for x in arrays)

    keys, values = grown(cache.keys, none, more), grown(cache.values, more, none)
    return KVCache(keys, values, cache.lengths)


def commit(cache: KVCache, new: KeyValues, counts: Int[Array, " B"]) -> KVCache:
    """Appends the first `counts[b]` of T new tokens to row b.

    All T slots are written, so `lengths + T` must not exceed S in rows that are not
    finished; rows whose count is 0 keep their text.
    """
    starts, lengths = cache.lengths, cache.lengths + counts
    if cache.is_stacked:
        keys, values = cache.keys[0], cache.values[0]
        keys = write_rows(keys, new.keys.transpose(1, 0, 3, 4, 2), starts, axis=4)
        rows = new.values.transpose(1, 0, 3, 2, 4)
        return KVCache((keys,), (write_rows(values, rows, starts, axis=3),), lengths)
    return KVCache(
        keys=tuple(
            write_rows(buffer, new.keys[layer].transpose(0, 2, 3, 1), starts, axis=3)
            for layer, buffer in enumerate(cache.keys)
        ),
        values=tuple(
            write_rows(buffer, new.values[layer].swapaxes(1, 2), starts, axis=2)
            for layer, buffer in enumerate(cache.values)
        ),
        lengths=lengths,
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


# The cache of a block drafter, a ring buffer.


def visible_part(cache: KVCache) -> KVCache:
    """The cache for attention, whose `lengths` are numbers of visible slots."""
    lengths = jnp.minimum(cache.lengths, cache.slots)
    return dataclasses.replace(cache, lengths=lengths)


def slot_positions(lengths: Int[Array, " B"], slots: int) -> Int[Array, "B S"]:
    """The text position of the token in every slot; 0 for empty slots.

    >>> slot_positions(jnp.array([6, 3]), 4).tolist()
    [[4, 5, 2, 3], [0, 1, 2, 0]]
    """
    slot = jnp.arange(slots)
    last = lengths[:, None] - 1
    return jnp.where(slot <= last, slot + (last - slot) // slots * slots, 0)


def cache_of_slots(
    new: KeyValues, lengths: Int[Array, " B"], slots: int = 0
) -> KVCache:
    """The cache whose slots hold the keys and values of `new`, in this order.

    If there are fewer of them than `slots`, empty slots follow.
    """
    missing = max(slots - new.keys.shape[2], 0)
    ends = [(0, 0), (0, 0), (0, missing), (0, 0), (0, 0)]
    new = jax.tree.map(lambda array: jnp.pad(array, ends), new)
    keys, values = new.keys.transpose(0, 1, 3, 4, 2), new.values.swapaxes(2, 3)
    return KVCache(keys=tuple(keys), values=tuple(values), lengths=lengths)


def append(cache: KVCache, new: KeyValues, counts: Int[Array, " B"]) -> KVCache:
    """Appends the first `counts[b]` of T new tokens to row b of a ring buffer.

    Other new tokens are not written, because their slots may have visible tokens.
    """
    length = new.keys.shape[2]
    if length > cache.slots:
        # In two parts, each with distinct slots.
        first, rest = (
            jax.tree.map(lambda x, part=part: x[:, :, part], new)
            for part in (slice(cache.slots), slice(cache.slots, None))
        )
        cache = append(cache, first, jnp.minimum(counts, cache.slots))
        return append(cache, rest, jnp.maximum(counts - cache.slots, 0))
    offsets = jnp.arange(length)
    slots = (cache.lengths[:, None] + offsets) % cache.slots
    accepted = offsets < counts[:, None]
    added = cache_of_slots(new, cache.lengths + counts)

    def write(
        old: tuple[Array, ...], rows: tuple[Array, ...], axis: int
    ) -> tuple[Array, ...]:
        return tuple(
            jax.vmap(_write_row, in_axes=(0, 0, 0, 0, None))(
                *pair, slots, accepted, axis
            )
            for pair in zip(old, rows, strict=True)
        )

    return dataclasses.replace(
        added,
        keys=write(cache.keys, added.keys, 2),
        values=write(cache.values, added.values, 1),
    )


def _write_row(
    row: Float[Array, "..."],
    new: Float[Array, "..."],
    slots: Int[Array, " T"],
    accepted: Bool[Array, " T"],
    axis: int,
) -> Float[Array, "..."]:
    row, new = jnp.moveaxis(row, axis, 0), jnp.moveaxis(new, axis, 0)
    mask = accepted.reshape(-1, *[1] * (row.ndim - 1))
    row = row.at[slots].set(jnp.where(mask, new.astype(row.dtype), row[slots]))
    return jnp.moveaxis(row, 0, axis)
