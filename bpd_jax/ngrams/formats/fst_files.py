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

Files are written and read without OpenFst.
"""

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from bpd_jax import files
from bpd_jax.buckets import as_path
from bpd_jax.errors import UserError
from bpd_jax.ngrams.formats import fst_format
from bpd_jax.ngrams.formats.fst_reader import FstReader
from bpd_jax.ngrams.formats.symbols import check_symbols
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.states import StateTable


def write_fst(
    model: NGramModel,
    path: str | os.PathLike[str],
    symbols: Sequence[str] | None = None,
) -> None:
    """Writes the automaton of a model for OpenFst and OpenGrm to read.

    Args:
      model: the model.
      path: the file.
      symbols: V strings for the tokens, kept in the file as its symbol tables.

    Raises:
      UserError: the symbols do not fit, or the file cannot be written.
    """
    if symbols is not None:
        check_symbols(model.vocab_size, symbols)
    with files.replacing_file(path) as temporary:
        temporary.write_bytes(fst_bytes(model, symbols=symbols))


def model_from_fst(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    symbols: Sequence[str] | None = None,
    end_of_text: int | None = None,
) -> NGramModel:
    """Reads the model of an automaton in OpenGrm's layout (whole sentences).

    It has the automaton's weights to the last bit, as float64.

    Args:
      path: the file.
      vocab_size: V; by default the length of `symbols`, or else the highest label.
      symbols: the strings of the tokens 0 ... V-1, to be found in the automaton's own
        symbol table; by default the label of a token is its id plus 1.
      end_of_text: the model's, see `NGramModel`.

    Raises:
      UserError: the file is missing, cut short or something else, or the automaton is
        not that of an n-gram model.
    """
    reader = FstReader(
        fst_format.decode(_read(as_path(path)), str(path)),
        str(path),
        vocab_size=vocab_size,
        symbols=symbols,
        end_of_text=end_of_text,
    )
    return reader.model


def _read(path: pathlib.Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if not data.startswith(fst_format.TYPES):
        raise UserError(f"{path} is not a vector automaton of standard arcs (OpenFst).")
    return data


def fst_bytes(
    model: NGramModel,
    *,
    continuous: bool = False,
    symbols: Sequence[str] | None = None,
) -> bytes:
    """Returns the automaton as OpenFst writes it; see `automaton_of`."""
    return fst_format.encode(automaton_of(model, continuous=continuous), symbols)


def automaton_of(
    model: NGramModel, *, continuous: bool = False
) -> fst_format.Automaton:
    """Returns states and arcs of a model's automaton.

    Args:
      model: the model.
      continuous: build it for text that goes on, as in decoding, instead of whole
        sentences: every state is final at no cost, and predicting `</s>` is an arc
        labelled with the model's `end_of_text` token (if it has one) to the start.
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
    # A stable sort is quick here: the parts are sorted already.
    by_source = np.argsort(source.astype(np.int64) * model.width + label, kind="stable")
    return fst_format.Automaton(
        start=table.start,
        finals=finals,
        arc_counts=np.bincount(source, minlength=table.num_states),
        labels=label[by_source],
        weights=np.concatenate(weights)[by_source],
        targets=np.concatenate(targets)[by_source],
    )


def _costs(logarithms: np.ndarray) -> np.ndarray:
    """Returns weights in float32; beyond its range a cost is infinite, which is never.

    Raises:
      UserError: a logarithm is no number, or so high that no weight can be.
    """
    with np.errstate(over="ignore"):
        costs = -logarithms.astype(np.float32)
    if np.isnan(costs).any() or np.isneginf(costs).any():
        raise UserError(
            "a log-probability or back-off weight is no number, or too large for an "
            f"automaton, whose weights end at {np.finfo(np.float32).max:.2g}: write "
            "the model as an ARPA file."
        )
    return costs
