"""The state of the decode loop, on the device, and the stop texts that it follows.

The state has one entry per row. A stop text need not begin or end at a token boundary:
two newlines may be one token or two, or the end of one and the beginning of the next.
An automaton over bytes (Aho and Corasick 1975) tracks how much of a stop text has been
read after every byte. Applied to the bytes of each token in advance, it becomes a table
from state and token to state.
"""

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
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


@flax.struct.dataclass
class StopTable:
    """An automaton over tokens that accepts texts with a stop text.

    Attributes:
      next_state: the next state by state and token. State 0 means that no prefix of a
        stop text has been read, the last state that a complete one has.
    """

    next_state: Int[Array, "states V"]

    @classmethod
    def of(cls, stops: Sequence[bytes], token_bytes: Sequence[bytes]) -> "StopTable":
        """Builds the table.

        Args:
          stops: stop texts, none of them empty.
        """
        automaton = _automaton(stops)
        longest = max(map(len, token_bytes), default=0)
        padded = np.zeros((len(token_bytes), longest), np.uint8)
        for token, text in enumerate(token_bytes):
            padded[token, : len(text)] = np.frombuffer(text, np.uint8)
        lengths = np.array([len(text) for text in token_bytes])
        states = np.repeat(np.arange(len(automaton))[:, None], len(token_bytes), axis=1)
        for index in range(longest):
            after = automaton[states, padded[:, index]]
            states = np.where(index < lengths, after, states)
        return cls(jnp.asarray(states, jnp.int32))

    def run(
        self, states: Int[Array, " B"], tokens: Int[Array, "B L"]
    ) -> tuple[Int[Array, "B L"], Bool[Array, "B L"]]:
        """The states after each token, and whether a stop text has been read."""
        after = []
        for index in range(tokens.shape[1]):
            states = self.next_state[states, tokens[:, index]]
            after.append(states)
        stacked = jnp.stack(after, axis=1)
        return stacked, stacked == self.next_state.shape[0] - 1


def _automaton(stops: Sequence[bytes]) -> np.ndarray:
    """`[states, 256]`: the next state by state and byte; the last state is absorbing.

    Worked example: for `ab` the states are 0 (empty), 1 (`a`) and 2 (`ab`); from state
    1, `a` leads to 1, `b` to 2 and every other byte to 0.
    """
    prefixes = sorted({stop[:n] for stop in stops for n in range(len(stop))}, key=len)
    state_of = {prefix: state for state, prefix in enumerate(prefixes)}
    final = len(prefixes)
    table = np.zeros((final + 1, 256), np.int32)
    table[final] = final
    for prefix, state in state_of.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            if any(text.endswith(stop) for stop in stops):
                table[state, byte] = final
                continue
            while text not in state_of:
                text = text[1:]
            table[state, byte] = state_of[text]
    return table


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop text, or all of it.

    The first stop text is the one that ends first. Of several that end at the same
    position, the longest counts, so that the result does not depend on the
    tokenization. Worked example: the stops `abc` and `b` cut `xabc` to
    `xa`, and `ab` and `b` cut it to `x`.
    """
    matches = [
        (begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0
    ]
    return text[: min(matches)[1]] if matches else text
