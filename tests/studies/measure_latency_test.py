import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.studies import measure_latency
from bpd_jax.studies.measure_latency import (
    Lattices,
    latency_records,
    make_rescorer,
    refine_milliseconds,
)

VOCAB = 300


def ngram_model(num_tokens):
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, num_tokens, 400).astype(np.int32) for _ in range(10)]
    counts = count_ngrams(texts, order=3, vocab_size=VOCAB, end_of_text=0)
    return estimate_katz(counts)


@pytest.fixture(scope="module")
def model():
    return ngram_model(VOCAB)


def test_lattices_have_the_format_of_decoding(model):
    lattice, context = Lattices(model, seed=3).make(2, 5, 4)
    assert lattice.tokens.shape == (2, 5, 4)
    assert context.shape == (2, 1)  # A trigram depends on it and the certain token.
    for row in lattice.tokens:
        assert len(set(row[0])) == 1
        assert all(len(set(column)) == 4 for column in row[1:])
    assert (np.diff(lattice.log_probs[:, 1:]) <= 0).all()
    repeated, _ = Lattices(model, seed=3).make(2, 5, 4)
    np.testing.assert_array_equal(lattice.tokens, repeated.tokens)


def test_every_engine_times_every_cell_once(model, monkeypatch):
    pytest.importorskip("pynini")
    pytest.importorskip("numba")
    monkeypatch.setattr(measure_latency, "SHAPES", [(2, 2, 1), (2, 2, 3)])
    sizes = {"runs": 3, "lattices": 2}
    records = list(latency_records(model, ["fst", "viterbi"], **sizes))
    assert [record.key for record in records] == [
        ("fst", 2, 2, 1),
        ("fst", 2, 2, 3),
        ("viterbi", 2, 2, 1),
        ("viterbi", 2, 2, 3),
    ]
    assert all(len(record.milliseconds) == 3 for record in records)
    assert all(ms > 0 for record in records for ms in record.milliseconds)
    finished = {record.key for record in records[:3]}
    remaining = latency_records(model, ["fst", "viterbi"], done=finished, **sizes)
    assert [record.key for record in remaining] == [("viterbi", 2, 2, 3)]


def test_one_time_is_measured_per_batch(model):
    lattice_and_context = Lattices(model).make(5, 3, 2)
    rescorer = make_rescorer("device", model)
    # Five lattices are two calls of two; the fifth is left over.
    assert refine_milliseconds(rescorer, 1, *lattice_and_context, batch=2).shape == (2,)


def test_invalid_requests_are_refused(model):
    with pytest.raises(UserError, match="unknown n-gram engine 'openfst'"):
        make_rescorer("openfst", model)
    with pytest.raises(UserError, match="fewer than 100"):
        next(latency_records(ngram_model(50), ["device"]))
