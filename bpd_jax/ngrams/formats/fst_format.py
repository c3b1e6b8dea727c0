"""Writes OpenFst's file format: VectorFst of StdArc, with or without symbol tables."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.ngrams.formats.symbols import EPSILON

# A file begins with a magic number, the FST type and the arc type.
MAGIC = struct.pack("<i", 2125659606)
_TYPES = MAGIC + struct.pack("<i6si8s", 6, b"vector", 8, b"standard")
_HEADER = struct.Struct("<iiQqqq")
_VERSION = 2
_INPUT_SYMBOLS, _OUTPUT_SYMBOLS = 1, 2
# Property bits of OpenFst: expanded, mutable; acceptor, input and output deterministic
# (epsilon counts as a symbol), sorted by input and output label.
_PROPERTIES = 0x1 | 0x2 | 0x10000 | 0x40000 | 0x100000 | 0x10000000 | 0x40000000

_STATE_WORDS = 3  # final weight (float32), number of arcs (int64)
_ARC_WORDS = 4  # input label, output label, weight (float32), next state

_SYMBOLS_MAGIC = struct.pack("<i", 2125658996)
_TABLE_NAME = b"tokens"


class Automaton(NamedTuple):
    """A weighted acceptor of S states and A arcs, sorted by source.

    Attributes:
      start: the start state.
      finals: `[S]` float32, infinity where a state is not final.
      arc_counts: `[S]` int64, number of arcs that leave each state.
      labels: `[A]` int32.
      weights: `[A]` float32.
      targets: `[A]` int32, states to which the arcs lead.
      symbols: names of the labels, if the file has a symbol table.
    """

    start: int
    finals: np.ndarray
    arc_counts: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    targets: np.ndarray
    symbols: dict[int, str] | None = None

    @property
    def sources(self) -> np.ndarray:
        """State from which each arc leaves, `[A]` int64."""
        return np.repeat(np.arange(self.arc_counts.size), self.arc_counts)


def encode(automaton: Automaton, symbols: Sequence[str] | None = None) -> bytes:
    """Encodes an automaton in OpenFst's file format.

    Args:
      automaton: the automaton; its `symbols` are not used.
      symbols: names of the labels 1, 2, ..., written as input and output symbols.
    """
    states, arcs = automaton.arc_counts.size, automaton.labels.size
    words = np.zeros(_STATE_WORDS * states + _ARC_WORDS * arcs, "<i4")
    # The arcs of a state follow it directly.
    before = np.cumsum(automaton.arc_counts) - automaton.arc_counts
    state_at = _STATE_WORDS * np.arange(states) + _ARC_WORDS * before
    words[state_at] = automaton.finals.view(np.int32)
    words[state_at + 1] = automaton.arc_counts  # low half of the int64
    arc_at = _arc_places(automaton.arc_counts)
    words[arc_at] = words[arc_at + 1] = automaton.labels
    words[arc_at + 2] = automaton.weights.view(np.int32)
    words[arc_at + 3] = automaton.targets
    table = b"" if symbols is None else _encode_symbols(symbols)
    header = _HEADER.pack(
        _VERSION,
        _INPUT_SYMBOLS | _OUTPUT_SYMBOLS if table else 0,
        _PROPERTIES,
        automaton.start,
        states,
        arcs,
    )
    return b"".join([_TYPES, header, table, table, words.tobytes()])


def _arc_places(arc_counts: np.ndarray) -> np.ndarray:
    """Returns the index of the first word of each arc."""
    states_before = np.repeat(np.arange(1, arc_counts.size + 1), arc_counts)
    return _STATE_WORDS * states_before + _ARC_WORDS * np.arange(states_before.size)


def _encode_symbols(symbols: Sequence[str]) -> bytes:
    names = [name.encode() for name in (EPSILON, *symbols)]
    pieces = [_SYMBOLS_MAGIC, struct.pack("<i", len(_TABLE_NAME)), _TABLE_NAME]
    pieces.append(struct.pack("<qq", len(names), len(names)))
    for label, name in enumerate(names):
        pieces += [struct.pack("<i", len(name)), name, struct.pack("<q", label)]
    return b"".join(pieces)
