"""What makes each kind of record: only what a run lacks, kept once it is there."""

from collections.abc import Callable, Iterable, Iterator

from bpd_jax import progress
from bpd_jax.decoding.asset_files import OWN_ASSETS
from bpd_jax.errors import UserError
from bpd_jax.reporting.records import Record
from bpd_jax.studies import study
from bpd_jax.studies.bench import Bench
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
from bpd_jax.studies.run_files import HEADER, StudyRun, open_run

Keep = Callable[[Iterable[Record]], None]
_LAMBADA = "lambada"


def measure_drafts(bench: Bench, run: StudyRun, keep: Keep) -> None:
    """Replays every contender on the texts of all tasks.

    What another study of the same folder has replayed already is taken from there.
    """
    done = {(r.contender, r.task, r.example) for r in run.of(DraftRecord)}
    known = [
        record
        for record in _of_other_studies(bench, run)
        if (record.contender, record.task, record.example) not in done
    ]
    keep(known)
    done |= {(r.contender, r.task, r.example) for r in known}
    missing = {
        name: [
            task
            for task in bench.config.tasks
            if any(
                (name, task, example.index) not in done
                for example in bench.examples(task)
            )
        ]
        for name in bench.config.contenders
    }
    total = sum(
        len(bench.examples(task)) for tasks in missing.values() for task in tasks
    )
    with progress.bar(label="replaying", total=total, unit=" texts") as bar:
        for name, tasks in missing.items():
            bar.set_postfix_str(name, refresh=False)
            for found in draft_records(bench, name, tasks) if tasks else ():
                keep(
                    record
                    for record in found
                    if (record.contender, record.task, record.example) not in done
                )
                bar.update(len(found))


def _of_other_studies(bench: Bench, run: StudyRun) -> Iterator[DraftRecord]:
    """Drafts of this study's contenders along its texts, each once."""
    config, seen = bench.config, set()
    wanted = {
        (task, example.index)
        for task in config.tasks
        for example in bench.examples(task)
    }
    for header in sorted(bench.workdir.glob(f"*/{HEADER}")):
        if header.parent == run.folder:
            continue
        other = open_run(header.parent)
        alike = [c for c in config.contenders if config.drafts_alike(other.facts, c)]
        for record in other.of(DraftRecord):
            key = (record.contender, record.task, record.example)
            if record.contender in alike and key[1:] in wanted and key not in seen:
                seen.add(key)
                yield record


def measure_oracle(bench: Bench, run: StudyRun, keep: Keep) -> None:
    """The oracle of every width and number of heads."""
    done = {record.task for record in run.of(OracleRecord)}
    for task in bench.config.tasks:
        if task not in done:
            keep(oracle_records(bench, task))


def measure_explorer(bench: Bench, run: StudyRun, keep: Keep) -> None:
    """Texts for the draft explorer."""
    done = {record.task for record in run.of(ExplorerRecord)}
    tasks = [task for task in bench.config.tasks if task not in done]
    for task in progress.bar(tasks, label="exploring", unit=" tasks"):
        contenders = bench.config.contenders
        keep(explorer_records(bench, task, contenders, bench.config.shown))


def measure_quality(bench: Bench, run: StudyRun, keep: Keep) -> None:
    """How good the texts are, where a task has a metric."""
    done = {record.task for record in run.of(QualityRecord)}
    tasks = [task for task in bench.config.tasks if task not in done]
    for task in progress.bar(tasks, label="scoring", unit=" tasks"):
        loaded, examples = bench.loaded(task), bench.examples(task)
        if task == _LAMBADA:
            passages = [example.prompt for example in examples]
            keep(
                passage_records(
                    task,
                    examples,
                    passages,
                    loaded.functions,
                    loaded.params,
                    loaded.tokenizer.encode,
                    begin_of_text=loaded.begin_of_text,
                    batch_size=bench.config.batch_size,
                )
            )
            continue
        outputs = [text.output_ids for text in bench.texts(task)]
        decode = loaded.tokenizer.decode
        keep(quality_records(task, examples, outputs, decode, loaded.end_tokens))


def measure_timing(bench: Bench, run: StudyRun, keep: Keep) -> None:
    """Decodes with a clock."""
    config = bench.config
    for found in timing_records(
        bench,
        config.tasks,
        config.contenders,
        config.temperatures,
        config.rounds,
        config.examples,
        {key_of(record) for record in run.of(TimingRecord)},
    ):
        keep(found)


def measure_latency(bench: Bench, run: StudyRun, keep: Keep) -> None:
    """Times the search for the best drafts of lattices."""
    decoder, _ = bench.contender(bench.config.contenders[0], bench.config.tasks[0])
    if decoder.ngram is None:
        raise UserError(
            f"{bench.config.contenders[0]} has no n-gram model to measure: name one in "
            f"assets ({', '.join(OWN_ASSETS)})."
        )
    done = {(r.engine, r.steps, r.width, r.paths) for r in run.of(LatencyRecord)}
    for record in latency_records(decoder.ngram, ENGINES[:3], done=done):
        keep([record])


WORK: dict[str, Callable[[Bench, StudyRun, Keep], None]] = {
    study.DRAFTS: measure_drafts,
    study.ORACLE: measure_oracle,
    study.EXPLORER: measure_explorer,
    study.QUALITY: measure_quality,
    study.TIMING: measure_timing,
    study.LATENCY: measure_latency,
}
"""By `Study.measures`."""
