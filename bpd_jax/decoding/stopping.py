"""Detection of stop texts on the device, during decoding.

A stop text need not begin or end at a token boundary: `\\n\\n` may be one token or two,
or the end of one and the beginning of the next. An automaton over bytes (Aho
and Corasick 1975) tracks how much of a stop text has been read after every byte.
Applied to the bytes of each token in advance, it becomes a table from state and token
to state.
"""

from collections.abc import Sequence

import flax.struct
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import Array, Bool, Int


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
