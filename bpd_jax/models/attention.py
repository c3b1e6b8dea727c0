"""Attention of T new tokens over a cached prefix and over each other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.models import cpu
from bpd_jax.models.cache import numbers


class Segments(NamedTuple):
    """Compact representation of the attention mask: see `causal_mask`.

    Attributes:
      ids: `[B, T]` the segment of each token; 0 is padding.
    """

    ids: Int[Array, "B T"]


def attention(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B U K H"],
    values: Float[Array, "B U K H"],
    mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"],
    prefix_keys: Float[Array, "B K H S"] | None = None,
    prefix_values: Float[Array, "B K S H"] | None = None,
    prefix_lengths: Int[Array, " B"] | Bool[Array, "B T S"] | None = None,
    *,
    softcap: float | None = None,
    for_decoding: bool = False,
) -> Float[Array, "B T N H"]:
    """Scaled dot-product attention with grouped queries; softmax in float32.

    The new tokens need not be a chain: `mask[b, i, j]` says whether query i sees key
    j, so a chain passes a triangle, packed documents a block triangle and a draft tree
    its ancestors. Keys may be more than queries: those of draft tokens run before. A
    mask with a fourth axis says that tokens are G groups of equal size, which do not
    see each other: P drafts side by side, at P times the cost of one. Every new token
    sees the first `prefix_lengths[b]` slots of the prefix, which is laid out as the
    cache is (see `KVCache`); instead of lengths, a mask may say which slots each new
    token sees. Each token must see itself, so that no row is empty. With a `softcap`,
    scores are `capped`. Attention `for_decoding` is neither differentiated nor spread
    over devices, so that a kernel may read the prefix.
    """
    batch, length, num_heads, width = queries.shape
    kv_heads = keys.shape[2]
    group = num_heads // kv_heads
    mask = mask if mask.ndim == 4 else mask[:, None]
    drafts = mask.shape[1]
    mask = jnp.repeat(mask, group, axis=2)[:, None]

    def joined(array: Array) -> Float[Array, "B K T n"]:
        return array.reshape(batch, kv_heads, -1, array.shape[-1])

    def split(array: Array) -> Float[Array, "B K G T/G n"]:
        return array.reshape(batch, kv_heads, drafts, -1, array.shape[-1])

    # Heads are a batch axis, before tokens, in every product: any other order makes
    # XLA copy the prefix on a CPU. The queries that share a key-value head are
    # concatenated along the T axis, so that no key is repeated.
    folded = queries.reshape(batch, length, kv_heads, group, width).swapaxes(1, 2)
    folded = joined(folded) * width**-0.5
    keys, values = split(keys.swapaxes(1, 2)), split(values.swapaxes(1, 2))

    scores = jnp.einsum("BKGTH,BKGUH->BKGTU", split(folded), keys)
    scores = capped(scores.astype(jnp.float32), softcap)
    scores = jnp.where(mask, scores, -jnp.inf)
    peak = scores.max(-1, keepdims=True)
    if prefix_keys is None:
        # Softmax does not depend on the peak, so no gradient flows through it.
        weights = jnp.exp(scores - jax.lax.stop_gradient(peak))
        weights /= weights.sum(-1, keepdims=True)
        mixed = joined(weights.astype(values.dtype) @ values)
    else:
        # Two score blocks under one softmax: the cache is never copied.
        assert prefix_values is not None
        assert prefix_lengths is not None
        prefix = folded, prefix_keys, prefix_values
        attended = None
        if prefix_lengths.ndim > 1:
            prefix_lengths = jnp.repeat(prefix_lengths, group, axis=1)
        elif for_decoding and softcap is None:
            attended = cpu.prefix_attention(*prefix, prefix_lengths)
        if attended is None:
            attended = _attend(*prefix, prefix_lengths, softcap)
        mixed, prefix_peak, prefix_total = attended
        peak = jnp.maximum(joined(peak), prefix_peak[..., None])
        share = jnp.exp(prefix_peak[..., None] - peak)
        weights = joined(jnp.exp(scores - split(peak)))
        total = weights.sum(-1, keepdims=True) + share * prefix_total[..., None]
        weights = split(weights / total).astype(values.dtype)
        mixed = joined(weights @ values) + mixed * (share / total)
        mixed = mixed.astype(values.dtype)
    mixed = mixed.reshape(batch, kv_heads, length, group, width).swapaxes(1, 2)
    return mixed.reshape(batch, length, num_heads, width)


def _attend(
    queries: Float[Array, "B K M H"],
    keys: Float[Array, "B K H S"],
    values: Float[Array, "B K S H"],
    visible: Int[Array, " B"] | Bool[Array, "B M S"],
    softcap: float | None,
) -> tuple[Float[Array, "B K M H"], Float[Array, "B K M"], Float[Array, "B K M"]]:
    """`cpu.prefix_attention` by XLA; a mask may stand for lengths."""
    keys, values = numbers(keys), numbers(values)
    if visible.ndim == 1:
        visible = (jnp.arange(values.shape[2]) < visible[:, None])[:, None]
    scores = capped((queries @ keys).astype(jnp.float32), softcap)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    peak = scores.max(-1)
    # If no key is visible the peak is -inf, which must not be subtracted.
    weights = jnp.exp(scores - jnp.maximum(peak, jnp.finfo(jnp.float32).min)[..., None])
    return weights.astype(values.dtype) @ values, peak, weights.sum(-1)


def capped(scores: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """`cap · tanh(scores / cap)`; unchanged if it is None."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def near(
    queries: Int[Array, "... T"], keys: Int[Array, "... U"], window: int
) -> Bool[Array, "... T U"]:
    """Whether a key is among the last `window` positions up to that of a query.

    >>> near(jnp.arange(4), jnp.arange(4), 2).astype(int)[3].tolist()
    [0, 0, 1, 1]
    """
    return queries[..., :, None] - keys[..., None, :] < window


def causal_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Each token sees itself and the earlier tokens of its own segment.

    >>> causal_mask(jnp.array([[1, 1, 2]])).astype(int)[0].tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    length = segment_ids.shape[-1]
    earlier = jnp.tril(jnp.ones((length, length), bool))
    return earlier & (segment_ids[:, :, None] == segment_ids[:, None, :])
