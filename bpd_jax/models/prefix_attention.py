"""Attention of few queries to the cache, which is read up to the text's end.

The queries are those of a pass over drafts. They see every slot that holds a token, or
the last ones within a sliding window; other slots are not read:

- on a GPU, `prefix_kernel` reads the visible slots of each row;
- on other devices XLA reads blocks of all rows, from the first to the last that any row
  of the batch needs, in a loop whose length is known at run time only.

The number of queries does not change the order in which the slots are summed; on
accelerators that of all slots and, on GPUs, of rows may, by rounding.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from bpd_jax.base.typing import Array, Bool, Float, Int, Num
from bpd_jax.models.attention import Attended, capped, product
from bpd_jax.models.cache import numbers
from bpd_jax.models.partitioning import attention_spec, first_device, has_tensor_cores
from bpd_jax.models.prefix_kernel import gpu_attention
from bpd_jax.models.stacks import InStack, in_stack

# Slots that XLA reads at a time.
_BLOCK = 512


def prefix_attention(
    queries: Float[Array, "B K M H"],
    keys: Num[Array, "B K H S"] | InStack,
    values: Num[Array, "B K S H"] | InStack,
    visible: Int[Array, " B"] | Bool[Array, "B T S"],
    positions: Int[Array, "B T"],
    window: int | None = None,
    softcap: float | None = None,
    mesh: Mesh | None = None,
) -> Attended:
    """Attends to the first `visible[b]` slots, or the last of them within a window.

    Args:
      queries: scaled; M is a multiple of T, and the queries of a token are adjacent.
      keys, values: of the cache; see `KVCache`.
      visible: number of slots that hold a token. In training, a mask may say which
        slots each token sees; then all are read.
      positions: of the T tokens. With a window, slot p holds the token at position p.
      window: number of last positions that a token sees, itself included; None for all.
    """
    group = queries.shape[2] // positions.shape[1]
    cache = in_stack(keys, axis=1), in_stack(values, axis=1)
    if visible.ndim > 1:
        mask = jnp.repeat(visible, group, axis=1)
        chosen = cache[0].chosen(), cache[1].chosen()
        return of_mask(queries, *chosen, mask, softcap)
    kernel = has_tensor_cores(first_device(mesh))
    attend = functools.partial(
        in_parts if kernel else in_blocks, window=window, softcap=softcap
    )
    arrays = queries, *cache, visible, jnp.repeat(positions, group, axis=1)
    if mesh is None or mesh.size == 1:
        return attend(*arrays)
    cached = attention_spec(len(queries), keys.shape[1], mesh, heads_axis=1)
    rows, stacked = PartitionSpec(cached[0]), PartitionSpec(cached[0], None, cached[1])
    specs: Any = InStack(stacked, PartitionSpec(), axis=1)
    # Every device reads up to the longest of its own rows.
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(cached, specs, specs, rows, rows),
        out_specs=cached,
        check_vma=False,
    )(*arrays)


def in_blocks(
    queries: Float[Array, "B K M H"],
    keys: Num[Array, "B K H S"] | InStack,
    values: Num[Array, "B K S H"] | InStack,
    lengths: Int[Array, " B"],
    positions: Int[Array, "B M"],
    window: int | None = None,
    softcap: float | None = None,
) -> Attended:
    """`prefix_attention` by XLA, with an online softmax over blocks of slots."""
    slots, keys, values = values.shape[2], in_stack(keys, 1), in_stack(values, 1)

    def visible(slot: Int[Array, " n"]) -> Bool[Array, "B #M n"]:
        mask = (slot < lengths[:, None])[:, None]
        if window is not None:
            mask &= positions[:, :, None] - slot < window
        return mask

    if slots <= _BLOCK:
        whole = keys.chosen(), values.chosen()
        return of_mask(queries, *whole, visible(jnp.arange(slots)), softcap)

    def add_block(index: Int[Array, ""], attended: Attended) -> Attended:
        # The last block ends with the last slot; slots that it shares with the one
        # before are not counted again.
        begin = index * _BLOCK
        start = jnp.minimum(begin, slots - _BLOCK)
        slot = start + jnp.arange(_BLOCK)
        cut = _cut(keys, start, axis=3), _cut(values, start, axis=2)
        seen = visible(slot) & (slot >= begin)
        mixed, peak, total = of_mask(queries, *cut, seen, softcap)
        highest = jnp.maximum(attended[1], peak)
        kept = jnp.exp(attended[1] - _finite(highest))
        share = jnp.exp(peak - _finite(highest))
        return (
            kept[..., None] * attended[0] + share[..., None] * mixed,
            highest,
            kept * attended[2] + share * total,
        )

    first: Array | int = 0
    if window is not None:
        first = jnp.maximum(positions.min() - window + 1, 0) // _BLOCK
    last = -(-lengths.max() // _BLOCK)
    empty = jnp.zeros(queries.shape, jnp.float32)
    nothing = empty, jnp.full(empty.shape[:3], -jnp.inf), empty[..., 0]
    return jax.lax.fori_loop(first, last, add_block, nothing)


def _cut(cached: InStack, start: Int[Array, ""], axis: int) -> Array:
    """A block of the slots of a layer, in one slice, so that XLA copies no layer."""
    starts = [jnp.int32(0)] * cached.stack.ndim
    starts[1], starts[axis + 1] = jnp.asarray(cached.index, jnp.int32), start
    sizes = list(cached.stack.shape)
    sizes[1], sizes[axis + 1] = 1, _BLOCK
    return jax.lax.dynamic_slice(cached.stack, starts, sizes)[:, 0]


def in_parts(*arguments: Any, **options: Any) -> Attended:
    """`in_blocks` by the kernel of a GPU, whose programs read parts of the slots."""
    mixed, peaks, totals = gpu_attention(*arguments, **options)
    peak = peaks.max(0)
    shares = jnp.exp(peaks - _finite(peak))
    return (shares[..., None] * mixed).sum(0), peak, (shares * totals).sum(0)


def of_mask(
    queries: Float[Array, "B K M H"],
    keys: Num[Array, "B K H S"],
    values: Num[Array, "B K S H"],
    visible: Bool[Array, "B #M S"],
    softcap: float | None = None,
) -> Attended:
    """Attention to the slots of a mask. All slots are read; it has a gradient."""
    keys, values = numbers(keys), numbers(values)
    scores = capped(product("BKMH,BKHS->BKMS", queries, keys), softcap)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    # Softmax does not depend on the peak, so no gradient flows through it.
    peak = jax.lax.stop_gradient(scores.max(-1))
    weights = jnp.exp(scores - _finite(peak)[..., None])
    mixed = product("BKMS,BKSH->BKMH", weights.astype(values.dtype), values)
    return mixed, peak, weights.sum(-1)


def _finite(peak: Array) -> Array:
    """The peak, of which -inf, of no visible slot, must not be subtracted."""
    return jnp.maximum(peak, jnp.finfo(jnp.float32).min)
