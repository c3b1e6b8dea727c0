"""Compiled loop of `bpd_jax.ngrams.formats.fst_format`."""

import numba
import numpy as np
from numba import types

STATE_WORDS = 3  # final weight (float32), number of arcs (int64)
ARC_WORDS = 4  # input label, output label, weight (float32), next state


@numba.njit(
    types.int64(types.Array(types.int32, 1, "C", readonly=True), types.int64[::1]),
    cache=True,
    nogil=True,
)
def find_states(words: np.ndarray, begins: np.ndarray) -> int:
    """Finds the states in the 32-bit words of an automaton.

    Args:
      words: all states, each followed by its arcs.
      begins: the result: first word of each state; as long as there may be states.

    Returns:
      The number of states, or -1 if the words do not end with the last arc of a state.
    """
    state = at = 0
    while at < words.size:
        if at + STATE_WORDS > words.size or words[at + 2] != 0 or words[at + 1] < 0:
            return -1
        begins[state] = at
        state += 1
        at += STATE_WORDS + ARC_WORDS * words[at + 1]
    return state if at == words.size else -1
