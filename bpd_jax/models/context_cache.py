"""The cache of a block drafter: keys and values of the last S accepted tokens of a row.

It is a `KVCache` that is used as a ring buffer: the token at position p of the text is
in slot p mod S, and `lengths` counts all accepted tokens, possibly more than S. Rotary
positions are part of the keys, so attention does not depend on the order of the slots.
The visible slots are always the first min(lengths, S).

Worked example (one row, 4 slots; `e f g` are new, of which two are accepted):

    slots   a b c d    length 4
    new     e f g      counts 2
    after   e f c d    length 6; the context is c d e f
"""

import dataclasses

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.models.cache import KeyValues, KVCache


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
    """Appends the first `counts[b]` of T new tokens to row b.

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
