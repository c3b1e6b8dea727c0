"""Attention of T new tokens over each other, and over what is before them."""

import abc
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Bool, Float, Int

# Attention to a part of the keys: the values weighted with the exponentials of the
# scores less the greatest one, [B, K, M, H]; the greatest score and the sum of its
# exponentials, [B, K, M]. All are float32; without a visible key the peak is -inf.
Attended = tuple[Array, Array, Array]


class WholeTexts(abc.ABC):
    """A mask that brings its own attention, of whole texts without a cache; a pytree.

    See `Segments` in `segment_attention`.
    """

    @abc.abstractmethod
    def attend(
        self,
        queries: Float[Array, "B T N H"],
        keys: Float[Array, "B T K H"],
        values: Float[Array, "B T K H"],
        implementation: str = "auto",
        mesh: Mesh | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Float[Array, "B T N H"]:
        """Attention of all tokens; for `implementation` see `ComputeConfig`."""


def attention(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B U K H"],
    values: Float[Array, "B U K H"],
    mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"],
    prefix: Callable[[Float[Array, "B K M H"]], Attended] | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Scaled dot-product attention with grouped queries; softmax in float32.

    The new tokens need not be a chain: `mask[b, i, j]` says whether query i sees key
    j, so a chain passes a triangle, packed documents a block triangle and a draft tree
    its ancestors. Keys may be more than queries: those of draft tokens run before. A
    mask with a fourth axis says that tokens are G groups of equal size, which do not
    see each other: P drafts side by side, at P times the cost of one. Each token must
    see itself, so that no row is empty.

    Args:
      queries: unscaled.
      keys, values: of the new tokens; N is a multiple of K.
      prefix: attends to the text before the new tokens; see `prefix_attention`. Its
        argument is scaled; the M = T · N / K queries of a key-value head are sorted by
        token.
      softcap: scores are `capped`.
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

    scores = capped(product("BKGTH,BKGUH->BKGTU", split(folded), keys), softcap)
    scores = jnp.where(mask, scores, -jnp.inf)
    # Softmax does not depend on the peak, so no gradient flows through it.
    peak = joined(jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    if prefix is not None:
        # Two score blocks under one softmax: the cache is never copied.
        before, prefix_peak, prefix_total = prefix(folded)
        peak = jnp.maximum(peak, prefix_peak[..., None])
        share = jnp.exp(prefix_peak[..., None] - peak)
    weights = joined(jnp.exp(scores - split(peak)))
    total = weights.sum(-1, keepdims=True)
    if prefix is not None:
        total += share * prefix_total[..., None]
    weights = split(weights / total).astype(values.dtype)
    mixed = joined(product("BKGTU,BKGUH->BKGTH", weights, values))
    if prefix is not None:
        mixed += before * (share / total)
    mixed = mixed.astype(values.dtype)
    mixed = mixed.reshape(batch, kv_heads, length, group, width).swapaxes(1, 2)
    return mixed.reshape(batch, length, num_heads, width)


def product(equation: str, x: Array, y: Array) -> Float[Array, "..."]:
    """A product summed in float32, and not rounded to less if x and y are float32.

    The keys of a token are multiplied in one pass as those of a new token, and in the
    next ones as those of the cache: both must have the same results.
    """
    return jnp.einsum(
        equation, x, y, precision="highest", preferred_element_type=jnp.float32
    )


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


def causal_mask(
    segment_ids: Int[Array, "B T"], window: int | None = None
) -> Bool[Array, "B T T"]:
    """Each token sees itself and the earlier tokens of its own segment and `window`.

    >>> causal_mask(jnp.array([[1, 1, 2]])).astype(int)[0].tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    length = segment_ids.shape[-1]
    seen = jnp.tril(jnp.ones((length, length), bool))
    if window is not None:
        at = jnp.arange(length)
        seen &= near(at, at, window)
    return seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
