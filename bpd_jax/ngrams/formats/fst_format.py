"""OpenFst's file format: VectorFst of StdArc, with or without symbol tables."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.formats.symbols import EPSILON

# The header begins with a magic number, the FST type and the arc type.
TYPES = struct.pack("<ii6si8s", 2125659606, 6, b"vector", 8, b"standard")
_HEADER = struct.Struct("<iiQqqq")
_VERSION = 2
_INPUT_SYMBOLS, _OUTPUT_SYMBOLS = 1, 2
# Property bits of OpenFst: expanded, mutable; acceptor, input and output deterministic
# (epsilon counts as a symbol), sorted by input and output label.
_PROPERTIES = 0x1 | 0x2 | 0x10000 | 0x40000 | 0x100000 | 0x10000000 | 0x40000000

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
    from bpd_jax.ngrams.formats.fst_kernels import ARC_WORDS, STATE_WORDS

    states, arcs = automaton.arc_counts.size, automaton.labels.size
    words = np.zeros(STATE_WORDS * states + ARC_WORDS * arcs, "<i4")
    # The arcs of a state follow it directly.
    before = np.cumsum(automaton.arc_counts) - automaton.arc_counts
    state_at = STATE_WORDS * np.arange(states) + ARC_WORDS * before
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
    return b"".join([TYPES, header, table, table, words.tobytes()])


def decode(data: bytes, name: str) -> Automaton:
    """Decodes OpenFst's file format.

    Args:
      data: content of a file.
      name: name of the file in error messages.

    Raises:
      UserError: the data are truncated, damaged, of another format, or a transducer.
    """
    if not data.startswith(TYPES):
        raise UserError(f"{name} is not an OpenFst vector FST with standard arcs.")
    try:
        return _decode(data)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise UserError(f"{name} is truncated or damaged: write it again.") from error
    except ValueError as error:
        raise UserError(f"{name} is not an acceptor: {error}.") from error


def _decode(data: bytes) -> Automaton:
    from bpd_jax.ngrams.formats import fst_kernels
    from bpd_jax.ngrams.formats.fst_kernels import STATE_WORDS

    at = len(TYPES)
    _, flags, _, start, states, _ = _HEADER.unpack_from(data, at)
    at += _HEADER.size
    symbols = None
    for flag in (_INPUT_SYMBOLS, _OUTPUT_SYMBOLS):
        if flags & flag:
            table, at = _decode_symbols(data, at)
            symbols = table if symbols is None else symbols
    if (len(data) - at) % 4:
        raise IndexError("the size is not a multiple of 4 bytes")
    words = np.frombuffer(data, "<i4", offset=at).astype(np.int32)
    begins = np.empty(words.size // STATE_WORDS + 1, np.int64)
    num_states = fst_kernels.find_states(words, begins)
    # Programs that write to a pipe store -1 as the number of states.
    if num_states < 0 or states not in (num_states, -1):
        raise IndexError("the states do not end where the data end")
    arc_counts = words[begins[:num_states] + 1].astype(np.int64)
    arc_at = _arc_places(arc_counts)
    labels, targets = words[arc_at], words[arc_at + 3]
    for state in (targets, np.array([start])):
        if state.size and not 0 <= state.min() <= state.max() < num_states:
            raise IndexError("there is no such state")
    if (labels != words[arc_at + 1]).any():
        raise ValueError("an arc has different input and output labels")
    return Automaton(
        start,
        words[begins[:num_states]].view(np.float32),
        arc_counts,
        labels,
        words[arc_at + 2].view(np.float32),
        targets,
        symbols,
    )


def _arc_places(arc_counts: np.ndarray) -> np.ndarray:
    """Returns the index of the first word of each arc."""
    from bpd_jax.ngrams.formats.fst_kernels import ARC_WORDS, STATE_WORDS

    states_before = np.repeat(np.arange(1, arc_counts.size + 1), arc_counts)
    return STATE_WORDS * states_before + ARC_WORDS * np.arange(states_before.size)


def _encode_symbols(symbols: Sequence[str]) -> bytes:
    names = [name.encode() for name in (EPSILON, *symbols)]
    pieces = [_SYMBOLS_MAGIC, struct.pack("<i", len(_TABLE_NAME)), _TABLE_NAME]
    pieces.append(struct.pack("<qq", len(names), len(names)))
    for label, name in enumerate(names):
        pieces += [struct.pack("<i", len(name)), name, struct.pack("<q", label)]
    return b"".join(pieces)


def _decode_symbols(data: bytes, at: int) -> tuple[dict[int, str], int]:
    """Returns names by label, and the end of the table."""

    def text(at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<i", data, at)
        if not 0 <= length <= len(data) - at - 4:
            raise IndexError("a name is longer than the file")
        return data[at + 4 : at + 4 + length].decode(), at + 4 + length

    if data[at : at + 4] != _SYMBOLS_MAGIC:
        raise IndexError("no symbol table")
    _, at = text(at + 4)
    _, size = struct.unpack_from("<qq", data, at)
    at += 16
    table = {}
    for _ in range(size):
        name, at = text(at)
        (label,) = struct.unpack_from("<q", data, at)
        table[label] = name
        at += 8
    return table, at
