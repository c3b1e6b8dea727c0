"""Exact n-gram refinement on the host: dynamic programming over histories."""

import threading
from typing import Any

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.drafting.engines.host import HostEngine
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.model import NGramModel

# Initial capacity for the nodes of a lattice's graph.
_CAPACITY = 4096


class ViterbiEngine(HostEngine):
    """Finds the P best paths of a lattice by dynamic programming over histories.

    Scores are exactly those of the model: a path backs off only where the model does.
    In addition to the model's arrays, the search needs an index: 8 bytes per n-gram of
    the orders below the highest, and 12 to 24 per n-gram whose history has more than 16
    extensions.
    """

    def __init__(
        self, model: NGramModel, alpha: float = 1.0, *, alpha_slope: float = 0.0
    ) -> None:
        """Builds the index of a model over the same token ids.

        This takes seconds for a hundred million n-grams.
        """
        super().__init__(model.order, alpha, alpha_slope)
        try:
            from bpd_jax.ngrams.search import host_kernels, table_kernels
        except ImportError as error:
            raise UserError(
                "the engine viterbi needs the package numba: pip install numba, or use "
                "the engine device."
            ) from error
        model = model.with_finite_scores()
        self._kernels: Any = host_kernels
        self._model = model
        shift = max(model.sizes).bit_length()
        unigrams = np.full(model.width, -1, np.int64)
        unigrams[model.keys[0]] = np.arange(model.keys[0].size)
        offsets, tables, bits = [], [], []
        for order in progress.bar(
            range(2, model.order + 1),
            label="index",
            unit=" orders",
            disable=sum(model.sizes) < 10_000_000,
        ):
            keys = _read_only(model.keys[order - 1])
            first = trie.child_offsets(model.keys, order - 1, model.width)
            sizes = np.diff(first)
            tabled = int(sizes[sizes > table_kernels.FEW].sum())
            # At most two thirds of the slots are used.
            bits.append((tabled * 3 // 2 + 1).bit_length())
            table = np.full(1 << bits[-1], -1, np.int64)
            table_kernels.fill_table(table, bits[-1], shift, keys, first)
            tables.append(_read_only(table))
            offsets.append(_read_only(first))
        # Numba requires non-empty tuples, also for unigram models.
        placeholder = (_read_only(np.zeros(1, np.int64)),)
        self._arrays = (
            tuple(_read_only(keys) for keys in model.keys),
            tuple(_read_only(log_probs) for log_probs in model.log_probs),
            tuple(_read_only(weights) for weights in model.log_backoffs)
            or (_read_only(np.zeros(1)),),
            tuple(offsets) or placeholder,
            unigrams,
            tuple(tables) or placeholder,
            np.array(bits or [1], np.int64),
            shift,
            model.width,
        )
        # Engines with other weights share it, but each thread has its own.
        self._memory = threading.local()

    def _best_paths(
        self,
        tokens: np.ndarray,
        log_probs: np.ndarray,
        history: np.ndarray,
        alphas: np.ndarray,
        num_drafts: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        model = self._model
        predicted = np.ascontiguousarray(tokens, np.int64)
        for ids in (predicted, history):
            if ids.size and not 0 <= np.min(ids) <= np.max(ids) < model.vocab_size:
                raise UserError(
                    f"the lattice or the text before it has a token outside the "
                    f"vocabulary 0 ... {model.vocab_size - 1}."
                )
        followed, past = predicted, np.asarray(history, np.int64)
        if model.end_of_text is not None:
            is_end = predicted == model.end_of_text
            followed = np.where(is_end, model.bos, predicted)
            predicted = np.where(is_end, model.eos, predicted)
            past = np.where(past == model.end_of_text, model.bos, past)
        past = np.ascontiguousarray(past[max(0, len(past) - model.order + 1) :])
        positions, candidates = predicted.shape
        choices = np.zeros((num_drafts, positions), np.int32)
        scores = np.zeros(num_drafts)
        count, capacity = -1, _CAPACITY
        while count < 0:
            memory = self._workspace(candidates, capacity)
            count = self._kernels.best_paths(
                self._arrays,
                past,
                predicted,
                followed,
                np.asarray(log_probs, np.float64),
                alphas,
                *memory,
                choices,
                scores,
            )
            capacity = 2 * len(memory[0][1])
        return tokens[np.arange(positions), choices[:count]], scores[:count]

    def _workspace(self, candidates: int, capacity: int) -> tuple[Any, ...]:
        """Memory of the compiled search; see `host_kernels.best_paths`."""
        by_size: dict[int, Any] = vars(self._memory).setdefault("by_size", {})
        memory = by_size.get(candidates)
        if memory is None or len(memory[0][1]) < capacity:
            fields = self._kernels
            graph = (
                np.empty((fields.NODE_FIELDS, capacity), np.int64),
                np.empty(capacity),
                np.empty((capacity, candidates)),
                np.empty((capacity, candidates), np.int32),
                np.empty((capacity, fields.LISTED + candidates), np.int32),
                np.empty(capacity),
            )
            queries = np.empty((fields.QUERY_FIELDS, capacity * candidates), np.int64)
            memory = (graph, queries, np.empty(capacity * candidates))
            by_size[candidates] = memory
        return memory


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view that has the same numba type for memory-mapped and ordinary arrays."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
