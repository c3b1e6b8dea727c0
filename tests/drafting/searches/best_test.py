"""The exact engines against brute force over all paths, and against each other."""

import concurrent.futures
import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.drafting.engines import viterbi
from bpd_jax.drafting.engines.fst import FstEngine
from bpd_jax.drafting.engines.viterbi import ViterbiEngine
from bpd_jax.drafting.lattice import Drafts, Lattice
from bpd_jax.drafting.refiners.lattice_graph import Room
from bpd_jax.drafting.refiners.ngram import NGramInputs, NGramRefiner
from bpd_jax.drafting.searches.best import best_under_ngram
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.formats.arpa_reader import read_arpa
from bpd_jax.ngrams.katz import estimate_katz
from tests.drafting.naive import (
    all_paths,
    assert_best,
    naive_steps,
    ngram_model,
    random_lattice,
)
from tests.ngrams.helpers import ODD_ARPA

VOCAB = 8
ENGINES = ["viterbi", "device"]


def on_device(refiner, num_drafts):
    """The compiled search under an n-gram model."""
    search = functools.partial(best_under_ngram, refiner, num_drafts=num_drafts)
    return functools.partial(jax.jit(search), arrays=refiner.arrays)


def assert_all_best(drafts: Drafts, model, alpha, lattice, context) -> None:
    """Checks drafts and their scores against the definition."""
    count = drafts.scores.shape[1]
    for row, tokens in enumerate(drafts.tokens):
        scores = drafts.scores[row]
        text = [int(t) for t in context[row] if t >= 0] + [
            int(lattice.tokens[row, 0, 0])
        ]
        steps = naive_steps(text, lattice, row, model, alpha)
        paths = all_paths(steps, lattice, row)
        used = np.isfinite(scores)
        assert used.tolist() == (np.arange(count) < len(paths)).tolist()
        assert_best(tokens[used], paths, count)
        claimed = [paths[tuple(draft)] for draft in tokens[used].tolist()]
        np.testing.assert_allclose(scores[used], claimed, rtol=1e-5, atol=1e-4)


def refine(engine, model, num_drafts, alpha, lattice, context) -> Drafts:
    """The best drafts by an engine, compared with the definition."""
    if engine == "viterbi":
        pytest.importorskip("numba")
        drafts = ViterbiEngine(model, alpha).refine(lattice, context, num_drafts)
    else:
        search = on_device(NGramRefiner.from_model(model, alpha), num_drafts)
        drafts = jax.device_get(search(lattice, context))
    assert_all_best(drafts, model, alpha, lattice, context)
    return drafts


def context_of(rng, order, batch):
    context = rng.integers(0, VOCAB, (batch, max(order - 2, 0))).astype(np.int32)
    context[0, : max(order - 3, 0)] = -1  # The first text has just begun.
    return context


@pytest.mark.parametrize(
    "engine, order, end_of_text",
    [
        *(("device", *sizes) for sizes in ((1, 0), (3, None), (5, 0))),
        ("viterbi", 3, None),
        # Numba compiles the search for every order.
        *(
            pytest.param("viterbi", order, 0, marks=pytest.mark.exhaustive)
            for order in (1, 2, 4, 5)
        ),
    ],
)
def test_best_drafts_equal_brute_force(engine, order, end_of_text):
    model = ngram_model(order, end_of_text)
    lattice = random_lattice(order, length=5)
    context = context_of(np.random.default_rng(order), order, 2)
    refine(engine, model, 7, 0.4, lattice, context)


@pytest.mark.parametrize("engine", [ViterbiEngine, FstEngine])
def test_methods_in_several_threads_share_an_engine(engine):
    pytest.importorskip("numba")
    pytest.importorskip("pynini")
    shared = engine(ngram_model(3), 0.4)
    lattices = [random_lattice(seed, 16, length=10, width=8) for seed in range(8)]
    contexts = [context_of(np.random.default_rng(seed), 3, 16) for seed in range(8)]

    def search(index: int) -> tuple[list, list]:
        part = index % 8
        drafts = shared.with_weight(0.4).refine(lattices[part], contexts[part], 16)
        return drafts.tokens.tolist(), drafts.scores.tolist()

    alone = [search(index) for index in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(search, range(32))) == alone * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_repeated_and_impossible_candidates(engine):
    model = ngram_model(3)
    lattice = random_lattice(5, length=4)
    tokens, log_probs = lattice.tokens.copy(), lattice.log_probs.copy()
    tokens[0, 1, 2] = tokens[0, 1, 0]
    # Of the copies, the better one may come second.
    tokens[1, 1, 2] = tokens[1, 1, 0]
    log_probs[1, 1] = log_probs[1, 1, ::-1]
    log_probs[:, 2, 1] = -np.inf
    lattice = Lattice(tokens, log_probs, np.zeros(tokens.shape[:2]))
    context = context_of(np.random.default_rng(5), 3, 2)
    drafts = refine(engine, model, 30, 1.0, lattice, context)
    assert np.isfinite(drafts.scores).sum(1).tolist() == [12, 12]


def test_overflowing_slots_do_not_change_the_drafts():
    model = ngram_model(4)
    lattice = random_lattice(4, length=5, width=4)
    context = context_of(np.random.default_rng(4), 4, 2)
    refiner = dataclasses.replace(
        NGramRefiner.from_model(model), room=Room(trigrams=8, histories=3, longer=5)
    )
    inputs = NGramInputs(context)
    transitions = jax.jit(refiner.transitions)(refiner.arrays, lattice, inputs)
    assert transitions.overflow.any()
    drafts = jax.device_get(on_device(refiner, 5)(lattice, context))
    assert_all_best(drafts, model, 1.0, lattice, context)


def test_search_grows_its_buffers(monkeypatch):
    model = ngram_model(3).with_unseen_tokens()
    lattice, context = random_lattice(3, length=7, width=6), np.array([[1], [2]])
    want = ViterbiEngine(model).refine(lattice, context, 3)
    monkeypatch.setattr(viterbi, "_CAPACITY", 2)
    drafts = ViterbiEngine(model).refine(lattice, context, 3)
    np.testing.assert_array_equal(drafts.tokens, want.tokens)
    np.testing.assert_array_equal(drafts.scores, want.scores)


# OpenFst takes no alpha of 0: scores are divided by it.
@pytest.mark.parametrize("engine, alpha", list(itertools.product(ENGINES, (0.0, 1.0))))
def test_odd_models_of_other_programs(engine, alpha, tmp_path):
    (tmp_path / "odd.arpa").write_text(ODD_ARPA)
    model = read_arpa(tmp_path / "odd.arpa", vocab_size=5, end_of_text=4)
    tokens = np.array([[[2, 2, 2], [0, 1, 4], [1, 4, 0], [3, 0, 2]]], np.int32)
    log_probs = np.log([[[1, 0.5, 0.5], [0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.3] * 3]])
    tokens, log_probs = tokens.repeat(3, 0), log_probs.astype(np.float32).repeat(3, 0)
    lattice = Lattice(tokens, log_probs, np.zeros(tokens.shape[:2]))
    context = np.array([[-1], [4], [0]], np.int32)
    refine(engine, model, 30, alpha, lattice, context)


@pytest.mark.parametrize("engine", ENGINES)
def test_histories_with_many_extensions(engine):
    rng = np.random.default_rng(4)
    texts = [rng.integers(1, 40, 2000).astype(np.int32) for _ in range(3)]
    counts = count_ngrams(texts, order=3, vocab_size=40, end_of_text=0)
    model = estimate_katz(counts)
    assert np.bincount(model.keys[1] // model.width).max() > 30
    tokens = np.stack([rng.permutation(40)[:6] for _ in range(4)])[None].astype(
        np.int32
    )
    log_probs = -np.sort(rng.exponential(2, tokens.shape)).astype(np.float32)
    log_probs[:, 0], tokens[:, 0] = [0, *[-np.inf] * 5], tokens[:, 0, :1]
    lattice, context = (
        Lattice(tokens, log_probs, np.zeros(tokens.shape[:2])),
        np.array([[7]], np.int32),
    )
    refine(engine, model, 20, 1.0, lattice, context)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("length, width", [(1, 3), (4, 1)])
def test_the_smallest_lattices(engine, length, width):
    model = ngram_model(3)
    lattice = random_lattice(3, length=length, width=width)
    context = context_of(np.random.default_rng(3), 3, 2)
    drafts = refine(engine, model, 3, 1.0, lattice, context)
    assert np.isfinite(drafts.scores).tolist() == [[True, False, False]] * 2


def test_invalid_lattices_and_weights_are_refused():
    engine = ViterbiEngine(ngram_model(3))
    lattice = random_lattice(1)
    outside = dataclasses.replace(lattice, tokens=lattice.tokens + 5)
    with pytest.raises(UserError, match=r"outside the vocabulary 0 \.\.\. 7"):
        engine.refine(outside, np.ones((2, 1), int), 2)
    for make in (ViterbiEngine, FstEngine, NGramRefiner.from_model):
        with pytest.raises(UserError, match=r"alpha must be .*, not -1"):
            make(ngram_model(3), -1)
