"""Attention to the cache on a GPU, a Pallas kernel in Triton.

A loop of XLA would copy every block of the cache, and the host would have to wait for
its condition. The slots that a row needs are divided evenly among several programs, so
that a small batch occupies the whole GPU (flash decoding).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.models.attention import capped
from bpd_jax.models.stacks import InStack, in_stack

# Programs that occupy a large GPU, twice its 132 multiprocessors.
_PROGRAMS = 264
# Queries of a program: a tile of the tensor cores has 16.
_LEAST, _MOST = 16, 64
# Bytes of the keys that a program reads at a time.
_TILE = 16_384


def gpu_attention(
    queries: Float[Array, "B K M H"],
    keys: Float[Array, "B K H S"] | InStack,
    values: Float[Array, "B K S H"] | InStack,
    lengths: Int[Array, " B"],
    positions: Int[Array, "B M"],
    window: int | None = None,
    softcap: float | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """`prefix_attention.in_blocks`, which reads only the visible slots of each row."""
    # Imported late: the import takes a second, and only GPUs need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    batch, heads, count, width = queries.shape
    slots, keys, values = values.shape[2], in_stack(keys, 1), in_stack(values, 1)
    layer = jnp.asarray(keys.index, jnp.int32).reshape(1)
    layers = keys.stack.shape[1]
    rows = min(max(pl.next_power_of_2(count), _LEAST), _MOST)
    padded = max(pl.next_power_of_2(width), _LEAST)
    block = max(_TILE // (padded * keys.dtype.itemsize), 16)
    tiles = pl.cdiv(count, rows)
    # Independent of the number of queries, and so is the order of the sums; that of
    # rows and slots matters by rounding.
    parts = max(1, min(_PROGRAMS // (batch * heads), pl.cdiv(slots, block)))
    first = jnp.zeros_like(lengths)
    if window is not None:
        first = jnp.maximum(positions.min(1) - window + 1, 0)

    def spec(*shape: int) -> pl.BlockSpec:
        """All of one row and head."""
        return pl.BlockSpec((None, None, *shape), lambda b, k, i: (b, k, 0, 0))

    def stack(*shape: int) -> pl.BlockSpec:
        """All of one row and head in all layers, of which the kernel chooses one."""
        return pl.BlockSpec(
            (None, layers, None, *shape), lambda b, k, i: (b, 0, k, 0, 0)
        )

    def out(*shape: int) -> pl.BlockSpec:
        zeros = (0,) * len(shape)
        return pl.BlockSpec(
            (None, None, None, *shape), lambda b, k, i: (i // tiles, b, k, *zeros)
        )

    number = pl.BlockSpec((None,), lambda b, k, i: (b,))
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    mixed, peaks, totals = pl.pallas_call(
        functools.partial(
            _kernel,
            rows=rows,
            padded=padded,
            block=block,
            parts=parts,
            window=window,
            softcap=softcap,
        ),
        grid=(batch, heads, tiles * parts),
        in_specs=[
            pl.BlockSpec((None,), lambda b, k, i: (0,)),
            number,
            number,
            pl.BlockSpec((None, count), lambda b, k, i: (b, 0)),
            spec(count, width),
            stack(width, slots),
            stack(slots, width),
        ],
        out_specs=[out(count, width), out(count), out(count)],
        out_shape=[
            shape((parts, *queries.shape)),
            shape((parts, *queries.shape[:3])),
            shape((parts, *queries.shape[:3])),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="prefix_attention",
    )(layer, first, lengths, positions, queries, keys.stack, values.stack)
    return mixed, peaks, totals


def _kernel(
    layer_ref: Any,
    first_ref: Any,
    lengths_ref: Any,
    positions_ref: Any,
    queries_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    mixed_ref: Any,
    peaks_ref: Any,
    totals_ref: Any,
    *,
    rows: int,
    padded: int,
    block: int,
    parts: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """One part of the slots, for a tile of the queries of one row and head."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (count, width), tiles = queries_ref.shape, pl.cdiv(queries_ref.shape[0], rows)
    tile, part = pl.program_id(2) % tiles, pl.program_id(2) // tiles
    layer = layer_ref[()]
    row = tile * rows + jnp.arange(rows)
    # Triton's arrays have sizes that are powers of 2.
    feature = jnp.arange(padded)
    within = (row < count)[:, None] & (feature < width)
    every, features = pl.ds(tile * rows, rows), pl.ds(0, padded)
    queries = triton.load(queries_ref.at[every, features], mask=within, other=0)
    positions = triton.load(positions_ref.at[every], mask=row < count, other=0)
    length = lengths_ref[()]
    low, high = first_ref[()] // block, pl.cdiv(length, block)
    share = pl.cdiv(high - low, parts)
    low += part * share
    # Products of float32 are not rounded to TF32; see `attention.product`.
    exact = keys_ref.dtype == jnp.float32
    dot = functools.partial(triton.dot, allow_tf32=False if exact else None)

    def add_block(index: Array, attended: tuple[Array, ...]) -> tuple[Array, ...]:
        mixed, peak, total = attended
        slot = index * block + jnp.arange(block)
        here, at = pl.ds(index * block, block), slot < length
        mask = (feature < width)[:, None] & at
        keys = triton.load(keys_ref.at[layer, features, here], mask=mask, other=0)
        values = triton.load(values_ref.at[layer, here, features], mask=mask.T, other=0)
        visible = at[None]
        if window is not None:
            visible &= positions[:, None] - slot < window
        scores = capped(dot(queries.astype(keys.dtype), keys), softcap)
        scores = jnp.where(visible, scores, -jnp.inf)
        highest = jnp.maximum(peak, scores.max(1))
        # The peak of no visible slot is -inf, which must not be subtracted.
        finite = jnp.maximum(highest, jnp.finfo(jnp.float32).min)
        weights, kept = jnp.exp(scores - finite[:, None]), jnp.exp(peak - finite)
        mixed = kept[:, None] * mixed + dot(weights.astype(values.dtype), values)
        return mixed, highest, kept * total + weights.sum(1)

    nothing = (
        jnp.zeros((rows, padded), jnp.float32),
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    mixed, peak, total = jax.lax.fori_loop(
        low, jnp.minimum(low + share, high), add_block, nothing
    )
    triton.store(mixed_ref.at[every, features], mixed, mask=within)
    triton.store(peaks_ref.at[every], peak, mask=row < count)
    triton.store(totals_ref.at[every], total, mask=row < count)
