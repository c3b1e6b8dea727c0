"""Records of texts, of engines and of times."""

import functools
import types

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding import generate
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.studies import measure_texts
from bpd_jax.studies.measure_texts import quality_records
from bpd_jax.studies.study_config import StudyConfig
from bpd_jax.studies.study_records import QualityRecord
from bpd_jax.studies.tasks import StudyExample
from experiments.refinements import method_of
from experiments.table12 import latency as measure_latency
from experiments.table12.latency import (
    Lattices,
    latency_records,
    make_rescorer,
    refine_milliseconds,
)
from experiments.table_e import measurement as measure_timing
from experiments.table_e.measurement import timing_records
from tests.decoding.random_models import make_prompts, make_small_decoder

LOADED = types.SimpleNamespace(
    tokenizer=types.SimpleNamespace(
        decode=lambda ids: "".join("<> abcd"[token] for token in ids), encode=None
    ),
    end_tokens=(0, 1),
    model=None,
    begin_of_text=None,
)


def records_of(task, examples, outputs=()):
    """The records of examples: part, prompt and references of each."""
    examples = [
        types.SimpleNamespace(index=3 + i, part=part, prompt=prompt, references=answers)
        for i, (part, prompt, answers) in enumerate(examples)
    ]
    context = types.SimpleNamespace(
        loaded=lambda _: LOADED,
        examples=lambda _: examples,
        texts=lambda _: [types.SimpleNamespace(output_ids=ids) for ids in outputs],
        config=types.SimpleNamespace(batch_size=2),
    )
    return quality_records(context, task)


def test_texts_are_scored_by_the_metric_of_their_task():
    """`b c` against `b` and `d`: precision 1/2 and recall 1 for `b`."""
    examples = [("report", "", ("b", "d")), ("tune", "", ("d",)), ("report", "", ())]
    outputs = [[4, 2, 5, 0], [2, 6, 1, 5], [4]]
    f1 = 2 / 3
    assert records_of("squad", examples, outputs) == [
        QualityRecord(
            "squad", 3, "report", "b c", ["b", "d"], {"exact_match": 0.0, "f1": f1}
        ),
        QualityRecord("squad", 4, "tune", "d", ["d"], {"exact_match": 1.0, "f1": 1.0}),
    ]
    assert records_of("qa", examples, outputs) == []


def test_last_words_are_the_references_of_passages(monkeypatch):
    scores = [{"log_prob": -1.0}, {"log_prob": -2.0}]
    monkeypatch.setattr(measure_texts, "passage_scores", lambda *a, **k: scores)
    records = records_of("lambada", [("report", "a b", ()), ("tune", "c d e", ())])
    assert [(x.example, x.part, x.references, x.scores) for x in records] == [
        (3, "report", ["b"], scores[0]),
        (4, "tune", ["e"], scores[1]),
    ]


TOKENS = 300


def ngram_model(num_tokens):
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, num_tokens, 400).astype(np.int32) for _ in range(10)]
    counts = count_ngrams(texts, order=3, vocab_size=TOKENS, end_of_text=0)
    return estimate_katz(counts)


@pytest.fixture(scope="module")
def model():
    return ngram_model(TOKENS)


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


def test_small_models_are_refused():
    with pytest.raises(UserError, match="fewer than 100"):
        next(latency_records(ngram_model(50), ["device"]))


class TinyBench:
    """Random parameters, random prompts of two tasks, a trigram model."""

    def __init__(self, decoder, **settings):
        self._decoder = decoder
        self.config = StudyConfig("table_e", "random", **settings)

    def examples(self, task):
        prompts = make_prompts([5, 6, 7, 8], seed=len(task))
        return [
            StudyExample(index, "report" if index else "tune", "", prompt, ())
            for index, prompt in enumerate(prompts)
        ]

    def options(self, task):
        return DecodeOptions(max_new_tokens=6, end_of_text=0, batch_size=2)

    def contender(self, name, task):
        return self._decoder, method_of(name)


@pytest.fixture(scope="module")
def bench():
    """Makes a context with one decoder and the given settings."""
    return functools.partial(TinyBench, make_small_decoder())


@pytest.fixture
def kept_programs(monkeypatch):
    """Programs are not compiled again for every round."""
    monkeypatch.setattr(measure_timing, "forget_compiled", lambda: None)


def test_contenders_alternate_and_produce_the_same_text(bench, monkeypatch):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        listen := lambda event, *_, **__: "compile" in event and compiled.append(event)
    )
    compile_counts = []

    def tick():
        compile_counts.append(len(compiled))
        return float(len(compile_counts))

    monkeypatch.setattr(generate, "time", types.SimpleNamespace(perf_counter=tick))
    context = bench(
        tasks=["qa"],
        contenders=["bpd", "greedy"],
        temperatures=[0.7],
        rounds=2,
        examples=2,
        speculative=["bpd"],
        batched=["bpd"],
    )
    parts = list(timing_records(context))
    jax.monitoring.unregister_event_duration_listener(listen)
    names = ("greedy", "bpd", "bpd (batched)", "bpd (speculative)")
    assert [part[0].key[:-1] for part in parts] == [
        ("qa", name, 0.7, turn) for turn in (0, 1) for name in names
    ]
    # Held-out examples only, as many as requested, one at a time.
    assert all([record.example for record in part] == [1, 2] for part in parts)
    assert all(record.seconds == 1.0 for part in parts for record in part)
    # Code was compiled, but not while time was measured.
    assert compiled
    assert compile_counts[0::2] == compile_counts[1::2]

    for part in parts:
        sampled = part[0].contender == "bpd (speculative)"
        assert all(r.identical is (None if sampled else True) for r in part)
        if part[0].contender == "greedy":
            greedy_part = part
            assert all(record.calls == record.tokens for record in part)
        elif not sampled:
            assert [r.tokens for r in part] == [r.tokens for r in greedy_part]
            assert all(1 <= r.calls <= r.tokens for r in part)


@pytest.mark.usefixtures("kept_programs")
def test_finished_measurements_are_skipped(bench):
    context = bench(tasks=["qa"], contenders=["bpd"], examples=1, speculative=["bpd"])
    measure = functools.partial(timing_records, context)

    first = next(measure(done=()))
    assert first[0].contender == "greedy"
    # At temperature 0, speculative sampling is not measured.
    remaining = list(measure(done={first[0].key}))
    assert [part[0].contender for part in remaining] == ["bpd"]
    assert remaining[0][0].identical
    done = {part[0].key for part in (first, *remaining)}
    assert not list(measure(done))
    # Another shard, or the beginning of an interrupted write, has one of two prompts.
    context = bench(tasks=["qa"], contenders=["bpd"], examples=2)
    again = [part[0].contender for part in timing_records(context, done)]
    assert again == ["greedy", "bpd"]


def test_compiled_programs_are_freed_before_the_next_task(bench):
    """A long study compiles more programs than a process may hold."""
    probe = jax.jit(lambda x: x + 1)
    sizes = []
    context = bench(tasks=["qa", "rag"], contenders=["bpd"], examples=1)
    for _ in timing_records(context):
        sizes.append(probe._cache_size())
        probe(0)
    assert sizes == [0, 1, 0, 1]


def test_invalid_requests_are_refused_before_timing(bench):
    context = bench(tasks=["qa"], contenders=["bpd", "draft_model:4"])
    with pytest.raises(UserError, match="draft_model"):
        next(timing_records(context))
