"""N-gram models as OpenFst automata in OpenGrm's layout.

Each history (`bpd_jax.ngrams.states`) is a state; the start state is the history `<s>`.
An n-gram `h w` is an arc with label w from h to the state after `h w`, with weight
-ln P(w | h); `h </s>` is the final weight of h. An epsilon arc (label 0) leads to the
history without its first symbol, with weight -ln alpha(h). Labels are token ids plus 1.
Weights are tropical: costs in nats, float32.

The epsilon arc is meant for symbols without an arc at the history, but any path of an
automaton may take it. So the cheapest path of a text may back off although the n-gram
exists; its cost is then lower than the model's, and never higher. This is the usual
approximation; exact composition needs failure arcs.

Files are written without OpenFst.
"""

import os
from collections.abc import Sequence

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.formats import fst_format
from bpd_jax.ngrams.formats.symbols import check_symbols
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.states import StateTable
from bpd_jax.storage import files


def write_fst(
    model: NGramModel,
    path: str | os.PathLike[str],
    symbols: Sequence[str] | None = None,
) -> None:
    """Writes a model as an OpenFst file.

    Args:
      model: the model.
      path: the file.
      symbols: strings of the V tokens, written as the symbol tables of the file.
    """
    if symbols is not None:
        check_symbols(model.vocab_size, symbols)
    with files.replacing_file(path) as temporary:
        temporary.write_bytes(fst_bytes(model, symbols=symbols))


def fst_bytes(
    model: NGramModel,
    *,
    continuous: bool = False,
    symbols: Sequence[str] | None = None,
) -> bytes:
    """Returns a model's automaton in OpenFst's file format; see `automaton_of`."""
    return fst_format.encode(automaton_of(model, continuous=continuous), symbols)


def automaton_of(
    model: NGramModel, *, continuous: bool = False
) -> fst_format.Automaton:
    """Returns the automaton of a model.

    Args:
      model: the model.
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
    return fst_format.Automaton(
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
