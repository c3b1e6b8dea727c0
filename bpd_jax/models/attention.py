"""Attention of T new tokens over a cached prefix and over each other."""

import jax
import jax.numpy as jnp

from bpd_jax.typing import Array, Bool, Float, Int


def attention(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    mask: Bool[Array, "B T T"],
    prefix_keys: Float[Array, "B S K H"] | None = None,
    prefix_values: Float[Array, "B S K H"] | None = None,
    prefix_lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B T N H"]:
    """Scaled dot-product attention with grouped queries; softmax in float32.

    The new tokens need not be a chain: `mask[b, i, j]` says whether token i sees
    token j, so a chain passes a triangle, packed documents a block triangle and a
    draft tree its ancestors. Every new token sees the first `prefix_lengths[b]`
    slots of the prefix. Each token must see itself, so that no row is empty.
    """
    batch, length, num_heads, width = queries.shape
    kv_heads = keys.shape[2]
    group = num_heads // kv_heads
    # The queries that share a key-value head stand side by side on the T axis: one
    # axis less to multiply over, and no key is repeated.
    folded = queries.reshape(batch, length, kv_heads, group, width).swapaxes(2, 3)
    folded = folded.reshape(batch, length * group, kv_heads, width) * width**-0.5
    mask = jnp.repeat(mask, group, axis=1)[:, None]

    scores = jnp.einsum("BTKH,BUKH->BKTU", folded, keys).astype(jnp.float32)
    scores = jnp.where(mask, scores, -jnp.inf)
    peak = scores.max(-1, keepdims=True)
    if prefix_keys is None:
        # Softmax does not depend on the peak, so no gradient flows through it.
        weights = jnp.exp(scores - jax.lax.stop_gradient(peak))
        total = weights.sum(-1, keepdims=True)
        mixed = _mix(weights / total, values)
    else:
        # Two score blocks under one softmax: the cache is never copied.
        assert prefix_values is not None
        assert prefix_lengths is not None
        visible = jnp.arange(prefix_keys.shape[1]) < prefix_lengths[:, None]
        prefix = jnp.einsum("BTKH,BSKH->BKTS", folded, prefix_keys)
        prefix = prefix.astype(jnp.float32)
        prefix = jnp.where(visible[:, None, None], prefix, -jnp.inf)
        peak = jnp.maximum(peak, prefix.max(-1, keepdims=True))
        weights, prefix_weights = jnp.exp(scores - peak), jnp.exp(prefix - peak)
        total = weights.sum(-1, keepdims=True) + prefix_weights.sum(-1, keepdims=True)
        mixed = _mix(weights / total, values)
        mixed += _mix(prefix_weights / total, prefix_values)
    mixed = mixed.reshape(batch, length, group, kv_heads, width).swapaxes(2, 3)
    return mixed.reshape(batch, length, num_heads, width)


def _mix(weights: Array, values: Array) -> Array:
    return jnp.einsum("BKTS,BSKH->BTKH", weights.astype(values.dtype), values)


def causal_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Each token sees itself and the earlier tokens of its own segment.

    >>> causal_mask(jnp.array([[1, 1, 2]])).astype(int)[0].tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    length = segment_ids.shape[-1]
    earlier = jnp.tril(jnp.ones((length, length), bool))
    return earlier & (segment_ids[:, :, None] == segment_ids[:, None, :])
