"""Measures the records of each kind that a run lacks, and stores them."""

from collections.abc import Callable, Collection, Iterable, Iterator

from bpd_jax.base import progress, provenance
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.asset_files import ASSET_FOLDERS
from bpd_jax.evaluation.metrics import metric_of
from bpd_jax.studies.measure_drafts import (
    draft_records,
    engine_records,
    entropy_records,
    oracle_records,
)
from bpd_jax.studies.measure_latency import FST, latency_records
from bpd_jax.studies.measure_texts import explorer_records, quality_records
from bpd_jax.studies.measure_timing import timing_records
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.run_files import HEADER, open_run, read_header
from bpd_jax.studies.study import (
    DRAFTS,
    ENGINES,
    ENTROPY,
    EXPLORER,
    LATENCY,
    ORACLE,
    QUALITY,
    TIMING,
    Study,
)
from bpd_jax.studies.study_config import parse_contender
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import (
    REPORT,
    DraftRecord,
    EngineRecord,
    EntropyRecord,
    ExplorerRecord,
    LatencyRecord,
    OracleRecord,
    QualityRecord,
    Record,
    TimingRecord,
)
from bpd_jax.studies.tasks import LAMBADA

Store = Callable[[Iterable[Record]], None]


def measure(study: Study, context: StudyContext, run: StudyRun, store: Store) -> None:
    """Measures all records that a study needs and a run lacks."""
    for kind in study.measures:
        if kind == DRAFTS:
            measure_drafts(context, run, store, study.example_parts)
        else:
            MEASUREMENTS[kind](context, run, store)


def measure_drafts(
    context: StudyContext, run: StudyRun, store: Store, parts: Collection[str]
) -> None:
    """Replays every contender on the texts of all tasks.

    Records that another study of the same folder already has are copied.
    """
    examples = {
        task: {e.index for e in context.examples(task) if e.part in parts}
        for task in context.config.tasks
    }
    done = {record.key for record in run.of(DraftRecord)}
    copied = {
        record.key: record
        for record in _of_other_studies(context, run)
        if record.key not in done and record.example in examples[record.task]
    }
    store(copied.values())
    done |= copied.keys()
    missing = {
        name: [
            task
            for task in context.config.tasks
            if any((name, task, index) not in done for index in examples[task])
        ]
        for name in context.config.contenders
    }
    total = sum(len(examples[task]) for tasks in missing.values() for task in tasks)
    with progress.bar(label="replaying", total=total, unit=" texts") as bar:
        for name, tasks in missing.items():
            bar.set_postfix_str(name, refresh=False)
            for records in draft_records(context, name, tasks, parts) if tasks else ():
                store(record for record in records if record.key not in done)
                bar.update(len(records))


def _of_other_studies(context: StudyContext, run: StudyRun) -> Iterator[DraftRecord]:
    """Yields other studies' drafts of this study's contenders along its texts.

    A draft that several studies have recorded is repeated.
    """
    config = context.config
    for header in sorted(context.workdir.glob(f"*/{HEADER}")):
        if header.parent == run.folder:
            continue
        facts = read_header(header.parent)
        if not config.same_texts(facts):
            continue
        made_with, texts = facts.get("made_with", {}), facts.get("texts", {})
        contenders = [
            c for c in config.contenders if made_with.get(c) == context.made_with(c)
        ]
        tasks = [
            task
            for task in config.tasks
            if texts.get(task) == context.digest(task, context.whole_draw(task))
        ]
        for record in open_run(header.parent).of(DraftRecord):
            if record.contender in contenders and record.task in tasks:
                yield record


def measure_oracle(context: StudyContext, run: StudyRun, store: Store) -> None:
    """Computes the oracle for every width and number of heads."""
    done = {record.key for record in run.of(OracleRecord)}
    for task in _unfinished(context, done):
        store(r for r in oracle_records(context, task) if r.key not in done)


def measure_entropy(context: StudyContext, run: StudyRun, store: Store) -> None:
    """Stores the entropies of the heads along all texts."""
    done = {record.key for record in run.of(EntropyRecord)}
    for task in _unfinished(context, done):
        store(r for r in entropy_records(context, task) if r.key not in done)


def measure_engines(context: StudyContext, run: StudyRun, store: Store) -> None:
    """Compares OpenFst with the exact search on the reported texts."""
    config = context.config
    done = {record.key for record in run.of(EngineRecord)}
    _same_device(run, run.of(EngineRecord))
    for name in config.contenders:
        if parse_contender(name).method.setting("engine") != FST:
            continue
        missing = [
            task
            for task in config.tasks
            if any(
                example.part == REPORT and (name, task, example.index) not in done
                for example in context.examples(task)
            )
        ]
        for records in engine_records(context, name, missing, [REPORT]):
            store(record for record in records if record.key not in done)


def measure_explorer(context: StudyContext, run: StudyRun, store: Store) -> None:
    """Records texts for the draft explorer."""
    contenders, shown = context.config.contenders, context.config.shown
    done = {
        record.key
        for record in run.of(ExplorerRecord)
        if {trace.contender for trace in record.traces} >= set(contenders)
    }
    tasks = [
        task
        for task in context.config.tasks
        if sum(task == other for other, _ in done) < shown
    ]
    for task in progress.bar(tasks, label="exploring", unit=" tasks"):
        records = explorer_records(context, task)
        store(r for r in records if r.key not in done)


def measure_quality(context: StudyContext, run: StudyRun, store: Store) -> None:
    """Scores the texts of all tasks that have a metric."""
    done = {record.key for record in run.of(QualityRecord)}
    tasks = [
        task
        for task in _unfinished(context, done)
        if task == LAMBADA or metric_of(task) is not None
    ]
    for task in progress.bar(tasks, label="scoring", unit=" tasks"):
        store(r for r in quality_records(context, task) if r.key not in done)


def _unfinished(context: StudyContext, done: Collection[tuple[str, int]]) -> list[str]:
    """The tasks that have examples without a record."""
    return [
        task
        for task in context.config.tasks
        if any((task, example.index) not in done for example in context.examples(task))
    ]


def measure_timing(context: StudyContext, run: StudyRun, store: Store) -> None:
    """Times decoding."""
    _same_device(run, run.of(TimingRecord))
    done = {record.key for record in run.of(TimingRecord)}
    for records in timing_records(context, done):
        store(record for record in records if record.key not in done)


def _same_device(run: StudyRun, records: Collection[Record]) -> None:
    """Raises a `UserError` if times of two devices would be mixed."""
    devices = {session["device"] for session in run.facts.get("sessions", [])}
    if records and devices - {provenance.device()}:
        raise UserError(
            f"{run.folder} has times that were measured on another device "
            f"({', '.join(sorted(devices))}) than this one ({provenance.device()}): "
            "choose another --workdir."
        )


def measure_latency(context: StudyContext, run: StudyRun, store: Store) -> None:
    """Times the search for the best drafts of lattices."""
    config = context.config
    decoder, _ = context.contender(config.contenders[0], config.tasks[0])
    if decoder.ngram is None:
        raise UserError(
            f"{config.contenders[0]} has no n-gram model to measure: give one in "
            f"assets ({', '.join(ASSET_FOLDERS)})."
        )
    _same_device(run, run.of(LatencyRecord))
    done = {record.key for record in run.of(LatencyRecord)}
    for record in latency_records(decoder.ngram, done=done):
        store([record])


MEASUREMENTS: dict[str, Callable[[StudyContext, StudyRun, Store], None]] = {
    ENTROPY: measure_entropy,
    ENGINES: measure_engines,
    ORACLE: measure_oracle,
    EXPLORER: measure_explorer,
    QUALITY: measure_quality,
    TIMING: measure_timing,
    LATENCY: measure_latency,
}
"""Functions by the names in `Study.measures`, but that of drafts."""
