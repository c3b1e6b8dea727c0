"""The state of the decode loop: everything per row, everything on the device."""

import flax.struct
import jax.numpy as jnp

from bpd_jax.models.cache import KVCache
from bpd_jax.typing import Array, Bool, Float, Int, PyTree


@flax.struct.dataclass
class History:
    """What each serial call did: one column per call, written as it happens.

    Attributes:
      proposed: the best-ranked draft of that call, -1 past its end.
      drafts: the draft that won, -1 past its end and past the end of the text.
      accepted: how many of its tokens were accepted.
      ranks: its rank among the drafts of that call, 0 for the best scored.
      nodes: different prefixes that the forward pass checked.
      entropies: of the heads that were drafted from, in nats; NaN without heads.
    """

    proposed: Int[Array, "C B L"]
    drafts: Int[Array, "C B L"]
    accepted: Int[Array, "C B"]
    ranks: Int[Array, "C B"]
    nodes: Int[Array, "C B"]
    entropies: Float[Array, "C B L"]


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
      stop_states: how far each row is in a stop text; see `bpd_jax.decoding.stopping`.
      memory: the drafter's.
      history: per call; None where nobody asks for it.
    """

    tokens: Int[Array, "B S"]
    limits: Int[Array, " B"]
    cache: KVCache
    hidden: Float[Array, "B D"]
    next_token: Int[Array, " B"]
    keys: Array
    done: Bool[Array, " B"]
    calls: Int[Array, " B"]
    stop_states: Int[Array, " B"]
    memory: PyTree
    history: History | None

    @property
    def lengths(self) -> Int[Array, " B"]:
        """Length of the text of each row, the prompt included."""
        return self.cache.lengths


def empty_history(calls: int, batch: int, block: int) -> History:
    """A history with room for `calls` serial calls."""
    return History(
        proposed=jnp.full((calls, batch, block), -1, jnp.int32),
        drafts=jnp.full((calls, batch, block), -1, jnp.int32),
        accepted=jnp.zeros((calls, batch), jnp.int32),
        ranks=jnp.zeros((calls, batch), jnp.int32),
        nodes=jnp.zeros((calls, batch), jnp.int32),
        entropies=jnp.full((calls, batch, block), jnp.nan, jnp.float32),
    )
