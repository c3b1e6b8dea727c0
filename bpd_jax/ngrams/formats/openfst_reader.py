"""Reads an n-gram model from an automaton in OpenGrm's layout.

OpenFst reads the file, in a process of its own (`openfst_arrays`).

The structure of the automaton determines the n-gram of each arc. The state without a
back-off arc is the empty history; the depth of a state, its number of back-off arcs to
that state, is the length of its history. The start state has the history `<s>`. Exactly
one arc leads to any other state of depth k from a state of depth k-1: its history is
that of the other state followed by the label of the arc.

Worked example, in which `a b` is the only history of length 2:

    state   back-off to   entered from   history
    0       -             -              ()
    1       0             (start)        <s>
    2       0             0 by b         b
    3       0             0 by a         a
    4       2             3 by b         a b
"""

import importlib.util
import io
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.backoff import NEVER
from bpd_jax.ngrams.counting.windows import MAX_ORDER
from bpd_jax.ngrams.formats import openfst_arrays
from bpd_jax.ngrams.formats.openfst import MAGIC, Automaton, StateTable, automaton_of
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path

# Costs are rounded to float32, so a probability of 1 may be slightly exceeded.
_ROUNDING = 1e-3


def model_from_fst(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
    symbols: Sequence[str] | None = None,
) -> NGramModel:
    """Reads a model from an automaton in OpenGrm's layout for complete sentences.

    The model has exactly the automaton's weights, as float64.

    Args:
      path: an OpenFst file of any type with standard arcs.
      vocab_size: V; by default the highest label.
      end_of_text: see `NGramModel`.
      symbols: names of the tokens 0 … V-1, which are looked up in the automaton's
        symbol table; by default the label of a token is its id plus 1.
    """
    automaton = read_automaton(as_path(path))
    try:
        if symbols is not None:
            automaton, vocab_size = _relabelled(automaton, symbols), len(symbols)
        return model_of(automaton, vocab_size, end_of_text)
    except ValueError as error:
        raise UserError(f"{path} is not an n-gram model: {error}.") from error


def read_automaton(path: pathlib.Path) -> Automaton:
    """Reads an OpenFst file in a process of its own, which damage may end."""
    data = b""
    try:
        # Only the beginning of another file, which may be large, is read. A pipe can be
        # opened only once.
        if path.is_file():
            with path.open("rb") as stream:
                data = stream.read(len(MAGIC))
        if data in (b"", MAGIC):
            data = files.read_bytes(path, most=None)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not a file of an automaton: {error}.") from error
    if not data.startswith(MAGIC):
        raise UserError(f"{path} is not a file of OpenFst.")
    if importlib.util.find_spec("pynini") is None:
        raise UserError(
            f"{path} is read with the package pynini: pip install pynini, or give the "
            "model's folder or ARPA file."
        )
    program = [sys.executable, openfst_arrays.__file__]
    done = subprocess.run(program, input=data, capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines and done.returncode > 0 else "it is damaged"
        raise UserError(
            f"{path} is not an acceptor with standard arcs that OpenFst can read: "
            f"{reason.removeprefix('_pywrapfst.')}."
        )
    arrays = np.load(io.BytesIO(done.stdout), allow_pickle=False)
    sources, labels, targets = arrays["arcs"].T
    names = zip(arrays["labels"].tolist(), arrays["names"].tolist(), strict=True)
    return Automaton(
        int(arrays["start"]),
        arrays["finals"],
        np.bincount(sources, minlength=arrays["finals"].size),
        labels.astype(np.int32),
        arrays["weights"],
        targets.astype(np.int32),
        dict(names) or None,
    )


def _relabelled(automaton: Automaton, symbols: Sequence[str]) -> Automaton:
    """The automaton whose labels are those of the names in another table."""
    if automaton.symbols is None:
        raise ValueError("it has no symbol table, in which to look up the symbols")
    ids = {name: label for label, name in enumerate(symbols, start=1)}
    different, indices = np.unique(automaton.labels, return_inverse=True)
    labels = []
    for label in different.tolist():
        name = automaton.symbols.get(label)
        if label and name not in ids:
            raise ValueError(f"{name or label!r} is not a token of the symbol table")
        labels.append(ids[str(name)] if label else 0)
    return automaton._replace(labels=np.array(labels, np.int32)[indices])


def model_of(
    automaton: Automaton, vocab_size: int | None = None, end_of_text: int | None = None
) -> NGramModel:
    """The model of an automaton; the inverse of `automaton_of`, up to float32.

    States may have any numbers. A `ValueError` says what another automaton lacks.
    """
    labels = automaton.labels
    if vocab_size is None:
        vocab_size = int(labels.max(initial=1))
    if labels.max(initial=0) > vocab_size or labels.min(initial=0) < 0:
        raise ValueError(f"a label is outside 0 ... {vocab_size}, the number of tokens")
    trie.check_vocab_size(vocab_size)
    width, bos = trie.symbol_width(vocab_size), trie.bos_symbol(vocab_size)
    root, depths, log_backoffs = _depths(automaton)

    # All n-grams: arcs, final weights (target -1), and `<s>`, which is never predicted.
    is_arc, ends = labels > 0, np.flatnonzero(automaton.finals != np.inf)
    start = -1 if automaton.start == root else automaton.start
    eos = np.full(ends.size, trie.eos_symbol(vocab_size))
    sources = np.concatenate([automaton.sources[is_arc], ends, [root]])
    symbols = np.concatenate([labels[is_arc] - 1, eos, [bos]])
    targets = np.concatenate([automaton.targets[is_arc], 0 * ends - 1, [start]])
    infinite = np.array([np.inf])
    costs = [automaton.weights[is_arc], automaton.finals[ends], infinite]
    log_probs = -np.concatenate(costs).astype(np.float64)
    if not (log_probs <= _ROUNDING).all():
        raise ValueError("a weight is NaN, or negative: a probability exceeds 1")

    # From order 1 on, the n-grams after the histories of one length; `indices` has the
    # index of each state's history among the n-grams of its length.
    indices = np.zeros(depths.size, np.int64)
    keys, probs, weights = [], [], []
    for order in range(int(depths[sources].max()) + 1):
        ngrams = np.flatnonzero(depths[sources] == order)
        key = indices[sources[ngrams]] * width + symbols[ngrams]
        by_key = np.argsort(key, kind="stable")
        key, ngrams = key[by_key], ngrams[by_key]
        histories = (targets[ngrams] >= 0) & (depths[targets[ngrams]] == order + 1)
        states = targets[ngrams[histories]]
        indices[states] = np.flatnonzero(histories)
        backoffs = np.zeros(key.size)
        backoffs[histories] = log_backoffs[states]
        keys.append(key)
        probs.append(np.minimum(log_probs[ngrams], 0.0))
        weights.append(backoffs)
    if any((np.diff(key) <= 0).any() for key in keys) or any(
        (link < 0).any() for link in trie.suffix_links(keys, width)
    ):
        raise ValueError("an n-gram occurs twice, or its suffix is missing")
    model = NGramModel(
        vocab_size, tuple(keys), tuple(probs), tuple(weights[:-1]), end_of_text
    )
    if not _same_arcs(model, automaton, depths, indices):
        raise ValueError(
            "an arc does not lead to the longest history after it, or to that without "
            "its first symbol"
        )
    return model


def _depths(automaton: Automaton) -> tuple[int, np.ndarray, np.ndarray]:
    """The state of the empty history; the depth and back-off weight of all states."""
    states, is_backoff = automaton.arc_counts.size, automaton.labels == 0
    sources = automaton.sources[is_backoff]
    roots = np.flatnonzero(np.bincount(sources, minlength=states) == 0)
    if sources.size + roots.size != states or roots.size != 1:
        raise ValueError(
            "every state but one must have exactly one back-off arc, but of "
            f"{states} states {roots.size} have none, and there are {sources.size} "
            "back-off arcs"
        )
    root = int(roots[0])
    backoffs, costs = np.full(states, root), np.zeros(states)
    backoffs[sources] = automaton.targets[is_backoff]
    costs[sources] = automaton.weights[is_backoff]
    if np.isnan(costs).any() or np.isneginf(costs).any():
        raise ValueError("the weight of a back-off arc is NaN or -inf")
    depths, above = np.zeros(states, np.int64), np.arange(states)
    while (moving := above != root).any():
        depths += moving
        above = backoffs[above]
        if np.max(depths) > MAX_ORDER:
            raise ValueError("its back-off arcs form a cycle")
    return root, depths, np.where(np.isposinf(costs), NEVER, -costs)


def _same_arcs(
    model: NGramModel, automaton: Automaton, depths: np.ndarray, indices: np.ndarray
) -> bool:
    """Whether the automaton of the model is `automaton`, but for numbers of states."""
    table, expected = StateTable(model), automaton_of(model)
    numbers = np.empty(depths.size, np.int64)
    for depth, of_depth in enumerate(table.numbers):
        states = depths == depth
        numbers[states] = of_depth[indices[states]]
    if depths.max() >= len(table.numbers) or not np.array_equal(
        np.sort(numbers), np.arange(table.num_states)
    ):
        return False
    columns = [numbers[automaton.sources], automaton.labels, numbers[automaton.targets]]
    order = np.lexsort(columns[1::-1])
    wanted = [expected.sources, expected.labels, expected.targets]
    return numbers[automaton.start] == expected.start and all(
        np.array_equal(column[order], other)
        for column, other in zip(columns, wanted, strict=True)
    )
