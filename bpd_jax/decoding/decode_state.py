"""The state of the decode loop, on the device, with one entry per row."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from bpd_jax.base.typing import Array, Bool, Float, Int, PyTree
from bpd_jax.models.cache import KVCache, row_specs
from bpd_jax.models.partitioning import BATCH_SPEC, constrain


@flax.struct.dataclass
class History:
    """A record of every serial call, one column per call; see `generate.Generation`."""

    proposed: Int[Array, "C B L"]
    drafts: Int[Array, "C B L"]
    accepted: Int[Array, "C B"]
    ranks: Int[Array, "C B"]
    nodes: Int[Array, "C B"]
    entropies: Float[Array, "C B L"]


@flax.struct.dataclass
class DecodeState:
    """The state between two serial calls.

    The cache holds the accepted text: `cache.lengths` is its length, and `hidden`
    belongs to its last token. `next_token` is chosen, but not yet part of the text.

    Attributes:
      tokens: prompt and text so far; the values after them are arbitrary.
      starts: lengths of the prompts.
      limits: the length at which each row stops.
      cache: keys and values of the text.
      hidden: final hidden state of the last accepted token.
      next_token: the certain token: the model's choice of the next token.
      keys: one random key per row; a position folds its index in.
      done: whether a row has finished; finished rows do not change.
      calls: number of serial calls of each row.
      stop_states: states of `StopTable`.
      memory: the memory of the drafter.
      history: a record of every call; None if it is not recorded.
    """

    tokens: Int[Array, "B S"]
    starts: Int[Array, " B"]
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
        """Length of the text of each row, including the prompt."""
        return self.cache.lengths


def specs(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """The specs of a state, by `row_specs`; a history's rows are its second axis."""
    history = jax.tree.map(lambda _: PartitionSpec(None, *BATCH_SPEC), state.history)
    return dataclasses.replace(row_specs(state, mesh), history=history)


def spread(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """A state in jitted code, spread over a mesh by `specs`."""
    each = specs(state, mesh)
    return jax.tree.map(lambda x, spec: constrain(x, mesh, spec), state, each)


def empty_history(calls: int, batch: int, block: int) -> History:
    """An empty history of up to `calls` serial calls."""
    return History(
        proposed=jnp.full((calls, batch, block), -1, jnp.int32),
        drafts=jnp.full((calls, batch, block), -1, jnp.int32),
        accepted=jnp.zeros((calls, batch), jnp.int32),
        ranks=jnp.zeros((calls, batch), jnp.int32),
        nodes=jnp.zeros((calls, batch), jnp.int32),
        entropies=jnp.full((calls, batch, block), jnp.nan, jnp.float32),
    )
