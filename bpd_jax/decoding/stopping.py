"""Stop texts, found on the device while decoding.

Tokens do not respect the borders of a stop text: `\\n\\n` may be one token, two, or the
end of one and the beginning of the next. An automaton over bytes (Aho and Corasick
1975) knows after every byte how much of a stop text has been read; run over the bytes
of each token beforehand, it becomes a table from state and token to state.
"""

from collections.abc import Sequence

import flax.struct
import jax.numpy as jnp
import numpy as np

from bpd_jax.typing import Array, Bool, Int


@flax.struct.dataclass
class StopTable:
    """The automaton of some stop texts over the tokens of a vocabulary.

    Attributes:
      next_state: state 0 has read nothing of a stop text, the last one all of it.
    """

    next_state: Int[Array, "states V"]

    @classmethod
    def of(cls, stops: Sequence[bytes], token_bytes: Sequence[bytes]) -> "StopTable":
        """Builds the table.

        Args:
          stops: what ends a text, none empty.
          token_bytes: the bytes of every token of the vocabulary.
        """
        automaton = _automaton(stops)
        longest = max(map(len, token_bytes), default=0)
        padded = np.zeros((len(token_bytes), longest), np.uint8)
        for token, text in enumerate(token_bytes):
            padded[token, : len(text)] = np.frombuffer(text, np.uint8)
        lengths = np.array([len(text) for text in token_bytes])
        states = np.repeat(np.arange(len(automaton))[:, None], len(token_bytes), axis=1)
        for place in range(longest):
            after = automaton[states, padded[:, place]]
            states = np.where(place < lengths, after, states)
        return cls(jnp.asarray(states, jnp.int32))

    @property
    def found(self) -> int:
        """The state in which a stop text has been read."""
        return self.next_state.shape[0] - 1

    def run(
        self, states: Int[Array, " B"], tokens: Int[Array, "B L"]
    ) -> tuple[Int[Array, "B L"], Bool[Array, "B L"]]:
        """The states after each token, and whether a stop text ended with it."""
        after = []
        for place in range(tokens.shape[1]):
            states = self.next_state[states, tokens[:, place]]
            after.append(states)
        stacked = jnp.stack(after, axis=1)
        return stacked, stacked == self.found


def _automaton(stops: Sequence[bytes]) -> np.ndarray:
    """From state and byte to state; the last state, once reached, is never left.

    Worked example: for `ab`, states 0 (nothing), 1 (`a`) and 2 (found); `a` leads from
    1 to 1, `b` to 2, every other byte to 0.
    """
    prefixes = sorted({stop[:n] for stop in stops for n in range(len(stop))}, key=len)
    number = {prefix: state for state, prefix in enumerate(prefixes)}
    found = len(prefixes)
    table = np.zeros((found + 1, 256), np.int32)
    table[found] = found
    for prefix, state in number.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            if any(text.endswith(stop) for stop in stops):
                table[state, byte] = found
                continue
            while text not in number:
                text = text[1:]
            table[state, byte] = number[text]
    return table


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the stop text that is complete first, or all of it.

    Of several that are complete at the same place the longest counts, so what is cut
    does not depend on how the text was split into tokens. Worked example: of `xabc`
    the stops `abc` and `b` leave `xa`, and `ab` and `b` leave `x`.
    """
    found = [
        (begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0
    ]
    return text[: min(found)[1]] if found else text
