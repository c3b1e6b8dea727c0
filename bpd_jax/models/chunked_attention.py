"""Causal attention within segments, computed for one chunk of the queries at a time.

The memory of a row grows linearly with its length, and tokens after a chunk are left
out of its scores, which are half of all. On a CPU forward and backward take less than
half the time of `attention.attention`: XLA multiplies batches of bfloat16 matrices fast
there if the result is float32 and the sums run over the last axis of the first operand.
The gradients of keys and values sum over its first axis, so that it is transposed in
memory before.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.models.attention import capped

# Queries of a chunk, at most.
_CHUNK = 256
# Shorter rows are one chunk.
_SHORTEST = 128
# The scores of longer rows are computed once more for their gradients.
_LONG = 1024
# The first key of a chunk is a multiple of it.
_EVEN = 128
# Chunks are compiled in at most so many groups, of which each has the same keys.
_GROUPS = 8


def chunked_attention(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    ids: Int[Array, "B T"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Each token attends to itself and the earlier tokens of its segment.

    Queries are unscaled; N is a multiple of K. Without `ids` every row is one segment.
    A token sees the last `window` tokens, itself included. Scores are
    `attention.capped`.
    """
    batch, length, num_heads, width = queries.shape
    kv_heads = keys.shape[2]
    folded = queries.reshape(batch, length, kv_heads, -1, width) * width**-0.5
    parts = max(2, -(-length // _CHUNK)) if length >= _SHORTEST else 1
    mixed = in_chunks(
        functools.partial(_attend, softcap=softcap),
        folded.swapaxes(1, 2),
        keys.swapaxes(1, 2),
        values.swapaxes(1, 2),
        ids,
        window,
        axis=2,
        size=-(-length // parts),
        recompute=length > _LONG,
    )
    return mixed.swapaxes(1, 2).reshape(batch, length, num_heads, width)


def in_chunks(
    attend: Callable[[Array, Array, Array, Bool[Array, "#B C U"]], Array],
    queries: Array,
    keys: Array,
    values: Array,
    ids: Int[Array, "B T"] | None,
    window: int | None,
    *,
    axis: int,
    size: int,
    recompute: bool,
) -> Array:
    """Calls `attend` with chunks of queries and with the keys that they may see.

    Args:
      attend: attention of C queries to U keys, with a mask of what each query sees.
      queries, keys, values: arrays with the tokens along `axis`.
      size: C; the last chunk may be shorter.
      recompute: whether gradients compute the scores once more, which are not kept.
    """
    length = queries.shape[axis]

    def cut(array: Array, begin: int, end: int, axis: int = axis) -> Array:
        return jax.lax.slice_in_dim(array, begin, end, axis=axis)

    def chunk(part: Array, begin: Int[Array, ""], low: int, high: int) -> Array:
        at, seen = begin + jnp.arange(part.shape[axis])[:, None], jnp.arange(low, high)
        mask = (seen <= at)[None]
        if window is not None:
            mask &= at - seen < window
        if ids is not None:
            own = jax.lax.dynamic_slice_in_dim(ids, begin, part.shape[axis], axis=1)
            mask &= own[:, :, None] == cut(ids, low, high, 1)[:, None]
        return attend(part, cut(keys, low, high), cut(values, low, high), mask)

    if recompute:
        chunk = jax.checkpoint(chunk, static_argnums=(2, 3))
    full = length // size
    groups = min(full, _GROUPS)
    bounds = [full * group // groups * size for group in range(groups + 1)]
    mixed = []
    for begin, end in itertools.pairwise([*bounds, *[length] * (length % size > 0)]):
        part, count = cut(queries, begin, end), -(-(end - begin) // size)
        # cuDNN needs an even number of keys; the mask hides those outside the window.
        low = 0 if window is None else max(0, begin + 1 - window) // _EVEN * _EVEN
        if count == 1:
            mixed.append(chunk(part, jnp.int32(begin), low, end))
            continue
        shape = (*part.shape[:axis], count, size, *part.shape[axis + 1 :])
        rows = jnp.moveaxis(part.reshape(shape), axis, 0)
        starts = begin + size * jnp.arange(count)
        rows = jax.lax.map(
            lambda x, low=low, end=end: chunk(x[0], x[1], low, end), (rows, starts)
        )
        mixed.append(jnp.moveaxis(rows, 0, axis).reshape(part.shape))
    return jnp.concatenate(mixed, axis=axis)


def _attend(
    queries: Float[Array, "B K C G H"],
    keys: Float[Array, "B K U H"],
    values: Float[Array, "B K U H"],
    mask: Bool[Array, "#B C U"],
    softcap: float | None,
) -> Float[Array, "B K C G H"]:
    batch, heads, _, group, width = queries.shape
    # The queries that share a key-value head are rows of one matrix.
    scores = _scores(queries.reshape(batch, heads, -1, width), keys)
    mask = jnp.repeat(mask, group, axis=1)[:, None]
    scores = jnp.where(mask, capped(scores, softcap), -jnp.inf)
    # Softmax does not depend on the peak, so no gradient flows through it.
    peak = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    weights /= weights.sum(-1, keepdims=True)
    return _mixed(weights.astype(values.dtype), values).reshape(queries.shape)


@jax.custom_vjp
def _scores(
    rows: Float[Array, "B K M H"], keys: Float[Array, "B K U H"]
) -> Float[Array, "B K M U"]:
    """`rows @ keys.T`, float32."""
    return _product("BKMH,BKUH->BKMU", rows, keys)


def _scores_backward(
    operands: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    rows, keys = operands
    gradient = gradient.astype(rows.dtype)
    by_keys = _product("BKUM,BKMH->BKUH", _transposed(gradient), rows)
    return (
        _product("BKMU,BKUH->BKMH", gradient, keys).astype(rows.dtype),
        by_keys.astype(keys.dtype),
    )


_scores.defvjp(lambda rows, keys: (_scores(rows, keys), (rows, keys)), _scores_backward)


@jax.custom_vjp
def _mixed(
    weights: Float[Array, "B K M U"], values: Float[Array, "B K U H"]
) -> Float[Array, "B K M H"]:
    """`weights @ values`, in their dtype."""
    return _product("BKMU,BKUH->BKMH", weights, values).astype(values.dtype)


def _mixed_backward(
    operands: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    weights, values = operands
    return (
        _product("BKMH,BKUH->BKMU", gradient, values).astype(weights.dtype),
        _product("BKUM,BKMH->BKUH", _transposed(weights), gradient).astype(
            values.dtype
        ),
    )


_mixed.defvjp(
    lambda weights, values: (_mixed(weights, values), (weights, values)),
    _mixed_backward,
)


def _product(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _transposed(matrices: Float[Array, "B K M U"]) -> Float[Array, "B K U M"]:
    """Transposes in memory: folded into a product, it takes several times as long."""
    return jax.lax.optimization_barrier(matrices.swapaxes(-1, -2))
