"""Makes each kind of record: measures what a run lacks, and keeps it."""

from collections.abc import Callable, Collection, Iterable, Iterator

from bpd_jax import progress
from bpd_jax.decoding.asset_files import OWN_ASSETS
from bpd_jax.errors import UserError
from bpd_jax.evaluation.metrics.catalog import metric_of
from bpd_jax.reporting import build
from bpd_jax.reporting.records import Record
from bpd_jax.studies import study
from bpd_jax.studies.measure import draft_records, oracle_records
from bpd_jax.studies.measure_explorer import explorer_records
from bpd_jax.studies.measure_latency import ENGINES, latency_records
from bpd_jax.studies.measure_quality import passage_records, quality_records
from bpd_jax.studies.measure_timing import key_of, timing_records
from bpd_jax.studies.records import (
    DraftRecord,
    ExplorerRecord,
    LatencyRecord,
    OracleRecord,
    QualityRecord,
    TimingRecord,
)
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.run_files import HEADER, open_run, read_header
from bpd_jax.studies.study_context import StudyContext

Keep = Callable[[Iterable[Record]], None]
_LAMBADA = "lambada"


def measure_drafts(context: StudyContext, run: StudyRun, keep: Keep) -> None:
    """Replays every contender on the texts of all tasks.

    What another study of the same folder has replayed already is taken from there.
    """
    done = {(r.contender, r.task, r.example) for r in run.of(DraftRecord)}
    known = [
        record
        for record in _of_other_studies(context, run)
        if (record.contender, record.task, record.example) not in done
    ]
    keep(known)
    done |= {(r.contender, r.task, r.example) for r in known}
    missing = {
        name: [
            task
            for task in context.config.tasks
            if any(
                (name, task, example.index) not in done
                for example in context.examples(task)
            )
        ]
        for name in context.config.contenders
    }
    total = sum(
        len(context.examples(task)) for tasks in missing.values() for task in tasks
    )
    with progress.bar(label="replaying", total=total, unit=" texts") as bar:
        for name, tasks in missing.items():
            bar.set_postfix_str(name, refresh=False)
            for found in draft_records(context, name, tasks) if tasks else ():
                keep(
                    record
                    for record in found
                    if (record.contender, record.task, record.example) not in done
                )
                bar.update(len(found))


def _of_other_studies(context: StudyContext, run: StudyRun) -> Iterator[DraftRecord]:
    """Drafts of this study's contenders along its texts, each once."""
    config, seen = context.config, set()
    wanted = {
        (task, example.index)
        for task in config.tasks
        for example in context.examples(task)
    }
    for header in sorted(context.workdir.glob(f"*/{HEADER}")):
        if header.parent == run.folder:
            continue
        facts = read_header(header.parent)
        if not config.texts_alike(facts):
            continue
        made_with, texts = facts.get("made_with", {}), facts.get("texts", {})
        alike = [
            c for c in config.contenders if made_with.get(c) == context.made_with(c)
        ]
        same = {
            task
            for task in config.tasks
            if texts.get(task) == context.digest(task, context.whole_draw(task))
        }
        other = open_run(header.parent)
        for record in other.of(DraftRecord):
            key = (record.contender, record.task, record.example)
            mine = record.task in same and record.contender in alike
            if mine and key[1:] in wanted and key not in seen:
                seen.add(key)
                yield record


def measure_oracle(context: StudyContext, run: StudyRun, keep: Keep) -> None:
    """The oracle of every width and number of heads."""
    done = {(record.task, record.example) for record in run.of(OracleRecord)}
    for task in _unfinished(context, done):
        keep(
            r for r in oracle_records(context, task) if (r.task, r.example) not in done
        )


def measure_explorer(context: StudyContext, run: StudyRun, keep: Keep) -> None:
    """Texts for the draft explorer."""
    contenders, shown = context.config.contenders, context.config.shown
    done = {
        (record.task, record.example)
        for record in run.of(ExplorerRecord)
        if {trace.contender for trace in record.traces} >= set(contenders)
    }
    tasks = [
        task
        for task in context.config.tasks
        if len([place for place in done if place[0] == task]) < shown
    ]
    for task in progress.bar(tasks, label="exploring", unit=" tasks"):
        found = explorer_records(context, task, contenders, shown)
        keep(r for r in found if (r.task, r.example) not in done)


def measure_quality(context: StudyContext, run: StudyRun, keep: Keep) -> None:
    """How good the texts are, where a task has a metric."""
    done = {(record.task, record.example) for record in run.of(QualityRecord)}
    tasks = [
        task
        for task in _unfinished(context, done)
        if task == _LAMBADA or metric_of(task) is not None
    ]
    for task in progress.bar(tasks, label="scoring", unit=" tasks"):
        found = _quality(context, task)
        keep(r for r in found if (r.task, r.example) not in done)


def _unfinished(context: StudyContext, done: Collection[tuple[str, int]]) -> list[str]:
    """Tasks with examples that are not done."""
    return [
        task
        for task in context.config.tasks
        if any((task, example.index) not in done for example in context.examples(task))
    ]


def _quality(context: StudyContext, task: str) -> list[QualityRecord]:
    loaded, examples = context.loaded(task), context.examples(task)
    if task == _LAMBADA:
        return passage_records(
            task,
            examples,
            [example.prompt for example in examples],
            loaded.functions,
            loaded.params,
            loaded.tokenizer.encode,
            begin_of_text=loaded.begin_of_text,
            batch_size=context.config.batch_size,
        )
    outputs = [text.output_ids for text in context.texts(task)]
    decode = loaded.tokenizer.decode
    return quality_records(task, examples, outputs, decode, loaded.end_tokens)


def measure_timing(context: StudyContext, run: StudyRun, keep: Keep) -> None:
    """Decodes with a clock.

    Raises:
      UserError: earlier records are of another device.
    """
    config = context.config
    _same_device(run, run.of(TimingRecord))
    done = {key_of(record) for record in run.of(TimingRecord)}
    for found in timing_records(
        context,
        config.tasks,
        config.contenders,
        config.temperatures,
        config.rounds,
        config.examples * config.turns,
        done,
        speculative=config.speculative,
    ):
        keep(found)


def _same_device(run: StudyRun, records: Collection[Record]) -> None:
    """Raises a `UserError` if times of two machines would be mixed."""
    known = {session["device"] for session in run.facts.get("sessions", [])}
    if records and known - {build.device()}:
        raise UserError(
            f"{run.folder} has times of another device ({', '.join(sorted(known))}) "
            f"than this one ({build.device()}): name another --workdir."
        )


def measure_latency(context: StudyContext, run: StudyRun, keep: Keep) -> None:
    """Times the search for the best drafts of lattices."""
    config = context.config
    decoder, _ = context.contender(config.contenders[0], config.tasks[0])
    if decoder.ngram is None:
        raise UserError(
            f"{config.contenders[0]} has no n-gram model to measure: name one in "
            f"assets ({', '.join(OWN_ASSETS)})."
        )
    _same_device(run, run.of(LatencyRecord))
    done = {(r.engine, r.steps, r.width, r.paths) for r in run.of(LatencyRecord)}
    for record in latency_records(decoder.ngram, ENGINES[:3], done=done):
        keep([record])


MEASUREMENTS: dict[str, Callable[[StudyContext, StudyRun, Keep], None]] = {
    study.DRAFTS: measure_drafts,
    study.ORACLE: measure_oracle,
    study.EXPLORER: measure_explorer,
    study.QUALITY: measure_quality,
    study.TIMING: measure_timing,
    study.LATENCY: measure_latency,
}
"""By `Study.measures`."""
