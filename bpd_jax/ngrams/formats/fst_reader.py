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
from typing import NoReturn

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.backoff import NEVER
from bpd_jax.ngrams.counting.windows import MAX_ORDER
from bpd_jax.ngrams.formats import openfst_arrays
from bpd_jax.ngrams.formats.fst_format import MAGIC, Automaton
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path

# Costs are rounded to float32, so a probability of 1 may be slightly exceeded.
_ROUNDING = 1e-3


def model_from_fst(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    symbols: Sequence[str] | None = None,
    end_of_text: int | None = None,
) -> NGramModel:
    """Reads a model from an automaton in OpenGrm's layout for complete sentences.

    The model has exactly the automaton's weights, as float64.

    Args:
      path: the file.
      vocab_size: V; by default the length of `symbols`, or else the highest label.
      symbols: strings of the tokens 0 ... V-1, which are looked up in the automaton's
        symbol table; by default the label of a token is its id plus 1.
      end_of_text: see `NGramModel`.
    """
    automaton = read_automaton(as_path(path))
    return FstReader(automaton, str(path), vocab_size, symbols, end_of_text).model


def read_automaton(path: pathlib.Path) -> Automaton:
    """Reads an OpenFst file of any type with standard arcs."""
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
    symbols = zip(arrays["labels"].tolist(), arrays["names"].tolist(), strict=True)
    return Automaton(
        int(arrays["start"]),
        arrays["finals"],
        np.bincount(sources, minlength=arrays["finals"].size),
        labels.astype(np.int32),
        arrays["weights"],
        targets.astype(np.int32),
        dict(symbols) or None,
    )


class FstReader:
    """Reads the n-grams of an automaton; `model` is the result."""

    def __init__(
        self,
        automaton: Automaton,
        name: str,
        vocab_size: int | None = None,
        symbols: Sequence[str] | None = None,
        end_of_text: int | None = None,
    ) -> None:
        self._automaton = automaton
        self._name = name
        self._sources = automaton.sources
        self._is_backoff = automaton.labels == 0
        for costs in (automaton.weights, automaton.finals):
            if np.isnan(costs).any() or np.isneginf(costs).any():
                self._fail("a weight is NaN or -inf")
        tokens = self._tokens(symbols)
        if vocab_size is None:
            vocab_size = len(symbols) if symbols else int(tokens.max(initial=0)) + 1
        if tokens.max(initial=0) >= vocab_size or tokens.min(initial=0) < 0:
            invalid = int(tokens.max() if tokens.max() >= vocab_size else tokens.min())
            self._fail(
                f"the label {invalid + 1} stands for the token {invalid}, which is "
                f"outside the vocabulary 0 ... {vocab_size - 1}"
            )
        trie.check_vocab_size(vocab_size, name)
        self._width = trie.symbol_width(vocab_size)
        self._bos = trie.bos_symbol(vocab_size)
        self._find_depths()
        self._collect(tokens, trie.eos_symbol(vocab_size))
        self._find_ngrams()
        self._check_targets()
        self.model = NGramModel(
            vocab_size,
            tuple(self._keys),
            tuple(self._log_probs),
            tuple(self._log_backoffs),
            end_of_text,
        )

    def _fail(self, reason: str) -> NoReturn:
        raise UserError(f"{self._name} is not an n-gram model: {reason}.")

    def _tokens(self, symbols: Sequence[str] | None) -> np.ndarray:
        """Returns the tokens of the arcs that are not back-off arcs."""
        labels = self._automaton.labels[~self._is_backoff]
        if symbols is None:
            return labels.astype(np.int64) - 1
        if self._automaton.symbols is None:
            self._fail("it has no symbol table, in which to look up the symbols")
        ids = {name: token for token, name in enumerate(symbols)}
        different, indices = np.unique(labels, return_inverse=True)
        tokens = []
        for label in different.tolist():
            name = self._automaton.symbols.get(label)
            if name not in ids:
                self._fail(f"{name or label!r} is not a token of the vocabulary")
            tokens.append(ids[name])
        return np.array(tokens, np.int64)[indices]

    def _find_depths(self) -> None:
        """Finds the back-off state and the depth of each state."""
        automaton, states = self._automaton, self._automaton.arc_counts.size
        sources = self._sources[self._is_backoff]
        roots = np.flatnonzero(np.bincount(sources, minlength=states) == 0)
        if sources.size + roots.size != states or roots.size != 1:
            self._fail(
                "every state but one must have exactly one back-off arc, but of "
                f"{states} states {roots.size} have none, and there are {sources.size} "
                "back-off arcs"
            )
        self._root = int(roots[0])
        self._backoffs = np.full(states, self._root)
        self._backoffs[sources] = automaton.targets[self._is_backoff]
        costs = np.zeros(states)
        costs[sources] = automaton.weights[self._is_backoff]
        self._state_weights = np.where(np.isposinf(costs), NEVER, -costs)
        self._depths = np.zeros(states, np.int64)
        above = np.arange(states)
        while (moving := above != self._root).any():
            self._depths += moving
            above = self._backoffs[above]
            if np.max(self._depths) > MAX_ORDER:
                self._fail("its back-off arcs form a cycle")

    def _collect(self, tokens: np.ndarray, eos: int) -> None:
        """Collects all n-grams: arcs, final weights and the unigram `<s>`."""
        automaton = self._automaton
        is_arc = ~self._is_backoff
        ends = np.flatnonzero(np.isfinite(automaton.finals))
        # `<s>` is never predicted. A target of -1 means that there is none.
        bos, none = np.array([self._bos]), np.array([-1])
        sources = [self._sources[is_arc], ends, np.array([self._root])]
        symbols = [tokens, np.full(ends.size, eos), bos]
        targets = [automaton.targets[is_arc], np.full(ends.size, -1), none]
        costs = [automaton.weights[is_arc], automaton.finals[ends], np.array([np.inf])]
        self._ngram_sources = np.concatenate(sources)
        self._ngram_symbols = np.concatenate(symbols)
        self._ngram_targets = np.concatenate(targets)
        log_probs = -np.concatenate(costs).astype(np.float64)
        if (log_probs > _ROUNDING).any():
            self._fail("a weight is negative, that is, a probability exceeds 1")
        self._ngram_log_probs = np.minimum(log_probs, 0.0)
        if automaton.start != self._root:
            if self._depths[automaton.start] != 1:
                self._fail("its start state does not back off to the empty history")
            self._ngram_targets[-1] = automaton.start

    def _find_ngrams(self) -> None:
        """Finds and sorts the n-grams of each order, from order 1 on."""
        targets = self._ngram_targets
        source_depths = self._depths[self._ngram_sources]
        extends = self._depths[targets] == source_depths + 1
        extends &= targets >= 0
        entries = np.bincount(targets[extends], minlength=self._depths.size)
        entries[self._root] += 1
        wrong = np.flatnonzero(entries != 1)
        if wrong.size:
            self._fail(
                f"the history of state {wrong[0]} is not clear: {entries[wrong[0]]} "
                "arcs enter it from states with a history one symbol shorter"
            )
        # The index of each state's history among the n-grams of its length.
        self._indices = np.zeros(self._depths.size, np.int64)
        self._keys: list[np.ndarray] = []
        self._log_probs: list[np.ndarray] = []
        self._log_backoffs: list[np.ndarray] = []
        self._sorted_targets: list[np.ndarray] = []
        for order in range(int(source_depths.max()) + 1):
            ngrams = np.flatnonzero(source_depths == order)
            parents = self._indices[self._ngram_sources[ngrams]]
            key = parents * self._width + self._ngram_symbols[ngrams]
            by_key = np.argsort(key, kind="stable")
            key, ngrams = key[by_key], ngrams[by_key]
            if (key[1:] == key[:-1]).any():
                self._fail("two arcs of a state have the same label")
            self._keys.append(key)
            self._log_probs.append(self._ngram_log_probs[ngrams])
            self._sorted_targets.append(targets[ngrams])
            indices = np.flatnonzero(extends[ngrams])
            states = targets[ngrams[indices]]
            self._indices[states] = indices
            if order < source_depths.max():
                weights = np.zeros(key.size)
                weights[indices] = self._state_weights[states]
                self._log_backoffs.append(weights)

    def _check_targets(self) -> None:
        """Compares where arcs lead with the longest history that is a state."""
        links = trie.suffix_links(self._keys, self._width)
        if any((link < 0).any() for link in links):
            self._fail("the suffix of an n-gram is missing")
        reached = np.array([self._root])
        for order, (link, targets) in enumerate(
            zip(links, self._sorted_targets, strict=True), start=1
        ):
            expected = reached[link]
            states = np.flatnonzero(self._depths == order)
            ngram_indices = self._indices[states]
            if (expected[ngram_indices] != self._backoffs[states]).any():
                self._fail(
                    "a back-off arc does not lead to the history without its first "
                    "symbol"
                )
            expected[ngram_indices] = states
            leads = targets >= 0
            if (expected[leads] != targets[leads]).any():
                self._fail("an arc does not lead to the longest history after it")
            reached = expected
