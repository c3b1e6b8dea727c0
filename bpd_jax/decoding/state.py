"""The state of the decode loop: everything per row, everything on the device."""

import flax.struct
import jax.numpy as jnp

from bpd_jax.models.cache import KVCache
from bpd_jax.typing import Array, Bool, Float, Int


@flax.struct.dataclass
class History:
    """What each serial call did: one column per call, written as it happens.

    Attributes:
      drafts: the draft that won, -1 past its end.
      accepted: how many of its tokens were accepted.
      ranks: its rank among the drafts of that call, 0 for the best scored.
    """

    drafts: Int[Array, "C B L"]
    accepted: Int[Array, "C B"]
    ranks: Int[Array, "C B"]


@flax.struct.dataclass
class DecodeState:
    """Between two serial calls.

    The cache holds exactly the accepted text, so `cache.lengths` is its length and
    `hidden` belongs to its last token. `next_token` is chosen but not yet part of it.

    Attributes:
      tokens: prompt and text so far, then leftovers.
      limits: the length at which each row must stop.
      cache: keys and values of the text.
      hidden: final hidden state of the last accepted token.
      next_token: the model's own choice of the token that follows.
      keys: one random key per row, used with the position it decides.
      done: rows that have finished; they are frozen.
      calls: serial calls that each row has used.
      history: per call.
    """

    tokens: Int[Array, "B S"]
    limits: Int[Array, " B"]
    cache: KVCache
    hidden: Float[Array, "B D"]
    next_token: Int[Array, " B"]
    keys: Array
    done: Bool[Array, " B"]
    calls: Int[Array, " B"]
    history: History

    @property
    def lengths(self) -> Int[Array, " B"]:
        """Length of the text of each row, the prompt included."""
        return self.cache.lengths


def empty_history(calls: int, batch: int, block: int) -> History:
    """A history with room for `calls` serial calls."""
    return History(
        drafts=jnp.full((calls, batch, block), -1, jnp.int32),
        accepted=jnp.zeros((calls, batch), jnp.int32),
        ranks=jnp.zeros((calls, batch), jnp.int32),
    )
