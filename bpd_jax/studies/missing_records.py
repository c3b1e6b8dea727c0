"""Measures the records of each kind that a run lacks, and stores them."""

import functools
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from bpd_jax.base import progress, provenance
from bpd_jax.base.errors import UserError
from bpd_jax.drafting.searches.best import FST
from bpd_jax.studies.measure_drafts import (
    draft_records,
    engine_records,
    entropy_records,
    oracle_records,
)
from bpd_jax.studies.measure_texts import explorer_records, quality_records
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.run_files import HEADER, open_run, read_header
from bpd_jax.studies.study import (
    DRAFTS,
    ENGINES,
    ENTROPY,
    EXPLORER,
    ORACLE,
    QUALITY,
    Done,
    Measurement,
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

Groups = Iterator[Sequence[Record]]


def measure(
    study: Study,
    context: StudyContext,
    run: StudyRun,
    store: Callable[[Iterable[Record]], None],
) -> None:
    """Measures all records that a study needs and a run lacks."""
    for name in study.measures:
        if name == DRAFTS:
            kind: type[Record] = DraftRecord
            measurement: Measurement = functools.partial(
                _drafts, run.folder, study.example_parts
            )
        else:
            kind, measurement = {**MEASUREMENTS, **study.measurements}[name]
        known = run.of(kind)
        if known and kind in (EngineRecord, TimingRecord, LatencyRecord):
            _check_device(run)
        done = {record.key for record in known}
        if kind is ExplorerRecord:
            # A text is recorded again with further contenders.
            contenders = set(context.config.contenders)
            done = {
                record.key
                for record in run.of(ExplorerRecord)
                if {trace.contender for trace in record.traces} >= contenders
            }
        for records in measurement(context, done):
            store(record for record in records if record.key not in done)


def _check_device(run: StudyRun) -> None:
    """Checks that times of two devices are not mixed."""
    devices = {session["device"] for session in run.facts.get("sessions", [])}
    if devices - {provenance.device()}:
        raise UserError(
            f"{run.folder} has times that were measured on another device "
            f"({', '.join(sorted(devices))}) than this one ({provenance.device()}): "
            "choose another --workdir."
        )


def _drafts(
    folder: pathlib.Path, parts: Collection[str], context: StudyContext, done: Done
) -> Groups:
    """Replays every contender on the texts of all tasks.

    Records that another study beside `folder` already has are copied.
    """
    examples = {
        task: {e.index for e in context.examples(task) if e.part in parts}
        for task in context.config.tasks
    }
    copied = {
        record.key: record
        for record in _of_other_studies(context, folder)
        if record.example in examples[record.task]
    }
    yield [*copied.values()]
    # In place: `measure` leaves out what is done when the others are stored.
    done.update(copied)
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
                yield records
                bar.update(len(records))


def _of_other_studies(
    context: StudyContext, folder: pathlib.Path
) -> Iterator[DraftRecord]:
    """Yields other studies' drafts of this study's contenders along its texts.

    A draft that several studies have recorded is repeated.
    """
    config = context.config
    for header in sorted(context.workdir.glob(f"*/{HEADER}")):
        if header.parent == folder:
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


def _by_task(
    records_of: Callable[[StudyContext, str], Sequence[Record]],
    context: StudyContext,
    done: Done,
) -> Groups:
    """Measures the tasks that have examples without a record."""
    tasks = [
        task
        for task in context.config.tasks
        if any((task, e.index) not in done for e in context.examples(task))
    ]
    for task in progress.bar(tasks, label="measuring", unit=" tasks"):
        yield records_of(context, task)


def _engines(context: StudyContext, done: Done) -> Groups:
    """Compares OpenFst with the exact search on the reported texts."""
    for name in context.config.contenders:
        if parse_contender(name).method.setting("engine") != FST:
            continue
        missing = [
            task
            for task in context.config.tasks
            if any(
                example.part == REPORT and (name, task, example.index) not in done
                for example in context.examples(task)
            )
        ]
        yield from engine_records(context, name, missing, [REPORT])


def _explorer(context: StudyContext, done: Done) -> Groups:
    """Records texts for the draft explorer."""
    tasks = [
        task
        for task in context.config.tasks
        if sum(task == other for other, _ in done) < context.config.shown
    ]
    for task in progress.bar(tasks, label="exploring", unit=" tasks"):
        yield explorer_records(context, task)


MEASUREMENTS: dict[str, tuple[type[Record], Measurement]] = {
    ENTROPY: (EntropyRecord, functools.partial(_by_task, entropy_records)),
    ENGINES: (EngineRecord, _engines),
    ORACLE: (OracleRecord, functools.partial(_by_task, oracle_records)),
    EXPLORER: (ExplorerRecord, _explorer),
    QUALITY: (QualityRecord, functools.partial(_by_task, quality_records)),
}
"""Records and measurements by the names in `Study.measures`, but those of drafts.

`Study.measurements` has those of one study.
"""
