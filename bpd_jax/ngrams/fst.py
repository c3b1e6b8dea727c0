"""The n-gram automaton of OpenFst, in OpenGrm's layout.

One state per history (`bpd_jax.ngrams.states`); the start state is the history `<s>`.
An n-gram `h w` is an arc from h, labelled w, to the state after `h w`, with weight
-ln P(w | h); `h </s>` is the final weight of h. An arc without label (0, epsilon) leads
to the history without its first symbol, with weight -ln alpha(h). Labels are token
ids plus 1. Weights are tropical: costs in nats, float32.

Taking the epsilon arc is meant for symbols that the history has no arc for, but an
automaton lets any path take it. So the cheapest path of a text may back off although
the n-gram is there, and its cost is then below that of the model; it is never above.
That is the usual approximation; exact composition needs failure arcs.

This module alone imports pynini, and only `build_fst` and `read_fst` need it.
"""

import os
import pathlib
import struct
from typing import TYPE_CHECKING

import numpy as np

from bpd_jax import files
from bpd_jax.errors import UserError
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.states import StateTable

if TYPE_CHECKING:
    import pynini

# The header of OpenFst's VectorFst of StdArc: magic number, names of the two types.
_TYPES = struct.pack("<ii6si8s", 2125659606, 6, b"vector", 8, b"standard")
_VERSION = 2
_NO_SYMBOL_TABLES = 0
# Property bits of OpenFst: expanded, mutable; acceptor, input and output deterministic
# (an epsilon is a symbol here), sorted by input and output label.
_PROPERTIES = 0x1 | 0x2 | 0x10000 | 0x40000 | 0x100000 | 0x10000000 | 0x40000000

_STATE_WORDS = 3  # final weight (float32), number of arcs (int64)
_ARC_WORDS = 4  # input label, output label, weight (float32), next state


def build_fst(model: NGramModel, *, continuous: bool = False) -> "pynini.Fst":
    """Returns the automaton of a model.

    Args:
      model: the model.
      continuous: build it for text that goes on, as in decoding, instead of whole
        sentences: every state is final at no cost, and predicting `</s>` is an arc
        labelled with the model's `end_of_text` token (if it has one) to the start.
    """
    import pynini

    return pynini.Fst.read_from_string(fst_bytes(model, continuous=continuous))


def write_fst(model: NGramModel, path: str | os.PathLike[str]) -> None:
    """Writes the automaton of a model for OpenFst and OpenGrm to read."""
    with files.replacing_file(path) as temporary:
        temporary.write_bytes(fst_bytes(model))


def read_fst(path: str | os.PathLike[str]) -> "pynini.Fst":
    """Reads an automaton of standard arcs.

    Raises:
      UserError: the file is missing, cut short or something else.
    """
    import pynini

    path = pathlib.Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if not data.startswith(_TYPES):
        raise UserError(f"{path} is not a vector automaton of standard arcs (OpenFst).")
    try:
        automaton = pynini.Fst.read_from_string(data)
    except OSError as error:  # pynini's FstIOError is one.
        raise UserError(f"{path} is cut short or damaged: write it again.") from error
    if not automaton.verify():
        raise UserError(f"{path} is damaged: write it again.")
    return automaton


def fst_bytes(model: NGramModel, *, continuous: bool = False) -> bytes:
    """Returns the automaton as OpenFst writes it; see `build_fst`."""
    table = StateTable(model)
    sources: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    finals = np.full(table.num_states, 0.0 if continuous else np.inf, np.float32)
    for order in range(1, model.order + 1):
        parents, symbols = np.divmod(model.keys[order - 1], model.width)
        source = table.numbers[order - 1][parents]
        target = table.reached[order]
        cost = -model.log_probs[order - 1]
        is_end = symbols == model.eos
        if not continuous:
            finals[source[is_end]] = cost[is_end]
        if continuous and model.end_of_text is not None:
            symbols = np.where(is_end, model.end_of_text, symbols)
            target = np.where(is_end, table.start, target)
        is_arc = symbols < model.eos
        sources.append(source[is_arc])
        labels.append(symbols[is_arc] + 1)
        weights.append(cost[is_arc])
        targets.append(target[is_arc])
    # Every state but the first has one epsilon arc.
    sources.append(np.arange(1, table.num_states))
    labels.append(np.zeros(table.num_states - 1, np.int64))
    weights.append(-table.backoff_weights[1:])
    targets.append(table.backoff_states[1:])

    source = np.concatenate(sources)
    label = np.concatenate(labels)
    # A stable sort is quick here: the parts are sorted already.
    by_source = np.argsort(source.astype(np.int64) * model.width + label, kind="stable")
    source, label = source[by_source], label[by_source]
    words = np.zeros(
        _STATE_WORDS * table.num_states + _ARC_WORDS * source.size, np.int32
    )
    # The arcs of a state follow it directly.
    number_of_arcs = np.bincount(source, minlength=table.num_states)
    arcs_before = np.cumsum(number_of_arcs) - number_of_arcs
    state_at = _STATE_WORDS * np.arange(table.num_states) + _ARC_WORDS * arcs_before
    words[state_at] = finals.view(np.int32)
    words[state_at + 1] = number_of_arcs  # low half of the int64; the high one is 0
    arc_at = _STATE_WORDS * (source + 1) + _ARC_WORDS * np.arange(source.size)
    words[arc_at] = label
    words[arc_at + 1] = label
    weight = np.concatenate(weights)[by_source].astype(np.float32)
    words[arc_at + 2] = weight.view(np.int32)
    words[arc_at + 3] = np.concatenate(targets)[by_source]
    header = _header(table.start, table.num_states, source.size)
    return header + words.astype("<i4").tobytes()


def _header(start: int, states: int, arcs: int) -> bytes:
    return _TYPES + struct.pack(
        "<iiQqqq", _VERSION, _NO_SYMBOL_TABLES, _PROPERTIES, start, states, arcs
    )
