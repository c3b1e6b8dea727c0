import functools
import types

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding import generate
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.studies import measure_timing
from bpd_jax.studies.measure_timing import timing_records
from bpd_jax.studies.study_config import StudyConfig
from bpd_jax.studies.tasks import StudyExample
from experiments.refinements import method_of
from tests.evaluation.random_decoder import VOCAB, random_decoder


class TinyBench:
    """Random parameters, random prompts of two tasks, a trigram model."""

    def __init__(self, decoder, **settings):
        self._decoder = decoder
        self.config = StudyConfig("table_e", "random", **settings)

    def examples(self, task):
        rng = np.random.default_rng(len(task))
        parts = ("tune", "report", "report", "report")
        return [
            StudyExample(
                index, part, "", rng.integers(0, VOCAB, 5 + index).astype(np.int32), ()
            )
            for index, part in enumerate(parts)
        ]

    def options(self, task):
        return DecodeOptions(max_new_tokens=6, end_of_text=0, batch_size=2)

    def contender(self, name, task):
        return self._decoder, method_of(name)


@pytest.fixture(scope="module")
def bench():
    """Makes a context with one decoder and the given settings."""
    return functools.partial(TinyBench, random_decoder())


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
        contenders=["ngram:2", "greedy", "bpd"],
        temperatures=[0.7],
        rounds=2,
        examples=2,
        speculative=["bpd"],
        batched=["ngram:2"],
    )
    parts = list(timing_records(context))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert [part[0].key[:-1] for part in parts] == [
        ("qa", name, 0.7, turn)
        for turn in (0, 1)
        for name in (
            "greedy",
            "ngram:2",
            "bpd",
            "ngram:2 (batched)",
            "bpd (speculative)",
        )
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
