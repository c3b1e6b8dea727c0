"""N-gram models as OpenFst automata in OpenGrm's layout, and their files.

Each history is a state (`StateTable`); the start state is the history `<s>`. An n-gram
`h w` is an arc with label w from h to the state after `h w`, with weight -ln P(w | h);
`h </s>` is the final weight of h. An epsilon arc (label 0) leads to the history without
its first symbol, with weight -ln alpha(h). Labels are token ids plus 1. Weights are
tropical: costs in nats, float32.

The epsilon arc is meant for symbols without an arc at the history, but any path of an
automaton may take it. So the cheapest path of a text may back off although the n-gram
exists; its cost is then lower than the model's, and never higher. This is the usual
approximation; exact composition needs failure arcs.

Files are written without OpenFst, as VectorFst of StdArc, and not read: pynini does it.
"""

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.formats.symbols import EPSILON, check_symbols
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.storage import files

# A file begins with a magic number, the FST type and the arc type.
_TYPES = struct.pack("<i", 2125659606) + struct.pack(
    "<i6si8s", 6, b"vector", 8, b"standard"
)
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


def write_fst(
    model: NGramModel,
    path: str | os.PathLike[str],
    symbols: Sequence[str] | None = None,
) -> None:
    """Writes a model as an OpenFst file.

    Args:
      symbols: names of the V tokens, written as the symbol tables of the file.
    """
    if symbols is not None:
        check_symbols(model.vocab_size, symbols)
    with files.replacing_file(path) as temporary:
        temporary.write_bytes(encode(automaton_of(model), symbols))


class Automaton(NamedTuple):
    """A weighted acceptor of S states and A arcs, sorted by source.

    Attributes:
      finals: `[S]` float32, infinity where a state is not final.
      arc_counts: `[S]` int64, number of arcs that leave each state.
      labels: `[A]` int32.
      weights: `[A]` float32.
      targets: `[A]` int32, states to which the arcs lead.
    """

    start: int
    finals: np.ndarray
    arc_counts: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    targets: np.ndarray


def automaton_of(model: NGramModel, *, continuous: bool = False) -> Automaton:
    """Returns the automaton of a model.

    Args:
      continuous: whether the automaton is for incomplete text, as in decoding, rather
        than for complete sentences: every state is final without cost, and `</s>` is an
        arc to the start state with the model's `end_of_text` token (if any) as label.
    """
    table = StateTable(model)
    sources: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    finals = np.full(table.num_states, 0.0 if continuous else np.inf, np.float32)
    for order in range(1, model.order + 1):
        parents, arc_symbols = np.divmod(model.keys[order - 1], model.width)
        source = table.numbers[order - 1][parents]
        target = table.reached[order]
        cost = _costs(model.log_probs[order - 1])
        is_end = arc_symbols == model.eos
        if not continuous:
            finals[source[is_end]] = cost[is_end]
        if continuous and model.end_of_text is not None:
            arc_symbols = np.where(is_end, model.end_of_text, arc_symbols)
            target = np.where(is_end, table.start, target)
        is_arc = arc_symbols < model.eos
        sources.append(source[is_arc])
        labels.append(arc_symbols[is_arc].astype(np.int32) + 1)
        weights.append(cost[is_arc])
        targets.append(target[is_arc])
    # Every state but the first has one epsilon arc.
    sources.append(np.arange(1, table.num_states, dtype=np.int32))
    labels.append(np.zeros(table.num_states - 1, np.int32))
    weights.append(_costs(table.backoff_weights[1:]))
    targets.append(table.backoff_states[1:])

    source, label = np.concatenate(sources), np.concatenate(labels)
    # A stable sort is fast here, because its parts are sorted already.
    by_source = np.argsort(source.astype(np.int64) * model.width + label, kind="stable")
    return Automaton(
        start=table.start,
        finals=finals,
        arc_counts=np.bincount(source, minlength=table.num_states),
        labels=label[by_source],
        weights=np.concatenate(weights)[by_source],
        targets=np.concatenate(targets)[by_source],
    )


def _costs(logarithms: np.ndarray) -> np.ndarray:
    """Returns float32 weights; costs above its range are infinite (impossible)."""
    with np.errstate(over="ignore"):
        costs = -logarithms.astype(np.float32)
    if np.isnan(costs).any() or np.isneginf(costs).any():
        raise UserError(
            "a log-probability or back-off weight is NaN, or exceeds the largest "
            f"weight of an automaton, {np.finfo(np.float32).max:.2g}: write the model "
            "as an ARPA file."
        )
    return costs


def encode(automaton: Automaton, symbols: Sequence[str] | None = None) -> bytes:
    """Encodes an automaton in OpenFst's file format.

    Args:
      symbols: names of the labels 1, 2, …, written as input and output symbols.
    """
    states, arcs = automaton.arc_counts.size, automaton.labels.size
    words = np.zeros(_STATE_WORDS * states + _ARC_WORDS * arcs, "<i4")
    # The arcs of a state follow it directly.
    before = np.cumsum(automaton.arc_counts) - automaton.arc_counts
    state_at = _STATE_WORDS * np.arange(states) + _ARC_WORDS * before
    words[state_at] = automaton.finals.view(np.int32)
    words[state_at + 1] = automaton.arc_counts  # low half of the int64
    states_before = np.repeat(np.arange(1, states + 1), automaton.arc_counts)
    arc_at = _STATE_WORDS * states_before + _ARC_WORDS * np.arange(arcs)
    words[arc_at] = words[arc_at + 1] = automaton.labels
    words[arc_at + 2] = automaton.weights.view(np.int32)
    words[arc_at + 3] = automaton.targets
    flags, table = 0, b""
    if symbols is not None:
        flags = _INPUT_SYMBOLS | _OUTPUT_SYMBOLS
        names = [name.encode() for name in (EPSILON, *symbols)]
        pieces = [_SYMBOLS_MAGIC, struct.pack("<i", len(_TABLE_NAME)), _TABLE_NAME]
        pieces.append(struct.pack("<qq", len(names), len(names)))
        for label, name in enumerate(names):
            pieces += [struct.pack("<i", len(name)), name, struct.pack("<q", label)]
        table = b"".join(pieces)
    header = _HEADER.pack(_VERSION, flags, _PROPERTIES, automaton.start, states, arcs)
    return b"".join([_TYPES, header, table, table, words.tobytes()])


class StateTable:
    """Numbers the histories of a model 0 ... S-1, in the order of OpenGrm's states.

    The empty history is state 0; `NGramModel.is_history` names the others. States are
    numbered by order, and within an order as in `bpd_jax.ngrams.trie`.

    After any text the model's prediction depends only on the longest suffix that is a
    history. Worked example: with the trigrams `a b c` and `b c d`, the histories of two
    symbols are `a b` and `b c`. After `a b c` the state is `b c`; after `a b x` it is
    `x` if `x` has extensions, and otherwise 0.

    Attributes:
      num_states: S.
      start: state of the history `<s>`.
      numbers: per length 0 ... N-1, `[n]` int32, the state of each n-gram; -1 if it is
        not a history.
      reached: per length 0 ... N, `[n]` int32, the state after each n-gram.
      backoff_states: `[S]` int32, the state of each history without its first symbol;
        0 for state 0.
      backoff_weights: `[S]` float64, natural logarithm of each history's back-off
        weight; 0 for state 0.
    """

    def __init__(self, model: NGramModel) -> None:
        self._model = model
        keys, width = model.keys, model.width
        links = trie.suffix_links(keys, width)
        start = trie.find(keys[0], np.zeros(1, np.int64), np.array([model.bos]), width)
        root = np.zeros(1, np.int32)
        self.numbers = [root]
        self.reached = [root]
        states = 1
        backoff_states, backoff_weights = [root], [np.zeros(1)]
        for length in range(1, model.order):
            is_history = model.is_history(length)
            numbers = np.full(is_history.size, -1, np.int32)
            size = int(np.count_nonzero(is_history))
            numbers[is_history] = np.arange(states, states + size)
            below = self.reached[length - 1][links[length - 1]]
            self.numbers.append(numbers)
            self.reached.append(np.where(is_history, numbers, below))
            backoff_states.append(below[is_history])
            backoff_weights.append(model.log_backoffs[length - 1][is_history])
            states += size
        self.reached.append(self.reached[-1][links[-1]])
        self.num_states = states
        has_start = model.order > 1 and start[0] >= 0
        self.start = int(self.numbers[1][start[0]]) if has_start else 0
        self.backoff_states = np.concatenate(backoff_states)
        self.backoff_weights = np.concatenate(backoff_weights)

    def of_history(self, tokens: Sequence[int]) -> int:
        """Returns the state after `tokens`, the oldest first.

        A text begins with `<s>`, which is passed as `model.bos` or as the token
        `model.end_of_text`. Only the last N-1 tokens matter. Takes at most N(N-1)/2
        binary searches.
        """
        model = self._model
        recent = [
            model.bos if token == model.end_of_text else int(token)
            for token in tokens[max(0, len(tokens) - model.order + 1) :]
        ]
        for begin in range(len(recent)):
            index = 0
            for keys, token in zip(model.keys, recent[begin:], strict=False):
                key = index * model.width + token
                index = int(keys.searchsorted(key))
                if index == keys.size or keys[index] != key:
                    break
            else:
                state = int(self.numbers[len(recent) - begin][index])
                if state >= 0:
                    return state
        return 0
