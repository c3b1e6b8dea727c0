"""Small n-gram models, random lattices, and what the definitions make of them."""

import functools
import itertools
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.drafting.interface import View
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.search.finite import with_finite_scores

VOCAB, END = 8, 0


@functools.cache
def _ngram_model(order: int, end_of_text: int | None, seed: int) -> NGramModel:
    rng = np.random.default_rng(order + 100 * seed)
    # Tokens 6 and 7 are never seen.
    texts = [rng.zipf(1.6, size=30).clip(1, VOCAB - 3) for _ in range(20)]
    counts = count_ngrams(
        [text.astype(np.int32) for text in texts],
        order=order,
        vocab_size=VOCAB,
        end_of_text=end_of_text,
    )
    return estimate_katz(counts)


@pytest.fixture(scope="session")
def ngram_model() -> Callable[..., NGramModel]:
    """Makes a model of a given order over eight tokens; token 0 ends a text."""

    def make(order: int, end_of_text: int | None = END, seed: int = 0) -> NGramModel:
        return _ngram_model(order, end_of_text, seed)

    return make


@pytest.fixture(scope="session")
def random_lattice() -> Callable[..., Lattice]:
    """Makes lattices of distinct candidates; the first position is certain."""

    def make(seed: int, batch: int = 2, length: int = 4, width: int = 3) -> Lattice:
        rng = np.random.default_rng(seed)
        tokens = np.stack(
            [
                [rng.permutation(VOCAB)[:width] for _ in range(length)]
                for _ in range(batch)
            ]
        )
        tokens[:, 0] = tokens[:, 0, :1]
        log_probs = -np.sort(rng.exponential(2, size=(batch, length, width)))
        log_probs[:, 0] = [0] + [-np.inf] * (width - 1)
        return Lattice(
            tokens.astype(np.int32),
            log_probs.astype(np.float32),
            np.zeros((batch, length), np.float32),
        )

    return make


@pytest.fixture(scope="session")
def random_view() -> Callable[..., View]:
    """Makes a view of a lattice behind random texts of different lengths."""

    def make(lattice: Lattice, seed: int = 0, slots: int = 20) -> View:
        rng = np.random.default_rng(seed)
        batch = len(lattice.tokens)
        return View(
            tokens=jnp.asarray(rng.integers(0, VOCAB, (batch, slots)), jnp.int32),
            lengths=jnp.asarray([slots - 5, 1, 7, 3][:batch], jnp.int32),
            next_token=jnp.asarray(lattice.tokens[:, 0, 0]),
            hidden=jnp.zeros((batch, 1)),
            keys=jax.random.split(jax.random.key(seed), batch),
            model=types.SimpleNamespace(lattice=lambda *_: lattice),
        )

    return make


def _naive_steps(
    view: View,
    lattice: Lattice,
    row: int,
    model: NGramModel | None = None,
    alpha: float = 1.0,
    slope: float = 0.0,
    *,
    adaptive: bool = False,
) -> Callable[[tuple[int, ...]], np.ndarray]:
    tokens = np.asarray(lattice.tokens[row])
    text = np.asarray(view.tokens)[row, : int(view.lengths[row])].tolist()
    text.append(int(tokens[0, 0]))
    known = with_finite_scores(model) if model else None

    def log_prob(history: list[int], token: int) -> float:
        value = known.log_prob(history, token)
        total = text[:-1].count(history[-1])
        if not adaptive or total == 0:
            return value
        pairs = list(itertools.pairwise(text)).count((history[-1], token))
        # (1 - λ) p + λ pairs / total with λ = total / (total + 1), as a logarithm.
        seen = np.log(pairs) if pairs else -np.inf
        return float(np.logaddexp(value, seen) - np.log(total + 1))

    def steps(picks: tuple[int, ...]) -> np.ndarray:
        """Scores of the candidates that may follow `picks`."""
        position = len(picks) + 1
        path = [int(tokens[j + 1, pick]) for j, pick in enumerate(picks)]
        scores = np.asarray(lattice.log_probs[row, position], np.float64)
        if known is None:
            return scores
        weight = max(0.0, alpha + slope * float(lattice.entropies[row, position]))
        return scores + weight * np.array(
            [log_prob(text + path, int(token)) for token in tokens[position]]
        )

    return steps


@pytest.fixture(scope="session")
def naive_steps() -> Callable[..., Callable[[tuple[int, ...]], np.ndarray]]:
    """The definition: scores of what may follow a path, under both opinions."""
    return _naive_steps
