"""Table 1: how good the texts are, and how many tokens a call of BPD yields."""

import re
from collections.abc import Sequence

from bpd_jax.evaluation.metrics.catalog import LABELS, PERPLEXITIES, headline_of
from bpd_jax.evaluation.metrics.estimates import estimate
from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Finding, Row, Table
from bpd_jax.studies import printed
from bpd_jax.studies.config import BPD
from bpd_jax.studies.records import REPORT, DraftRecord, QualityRecord
from bpd_jax.studies.results import (
    by_task,
    drafts_of,
    efficiency_cell,
    missing_cell,
    tasks_of,
)
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import DRAFTS, QUALITY, Study

NOTES = [
    "The paper finetunes a model of 1.5 billion parameters on every task but LAMBADA. "
    "A model that was not finetuned, such as SmolLM2, answers in sentences of its own, "
    "which exact match counts as wrong: F1 says more. Texts that were cut at the limit "
    "of tokens are scored as they are.",
    "Perplexity is per token of the model's own vocabulary, over all tokens of a "
    "passage but the first, so values of different vocabularies do not compare; the "
    "paper does not say of which tokens its own is. Last words count as right if "
    "greedy decoding writes them.",
    "Exact match and F1 follow the official script of SQuAD. ROUGE is the F-measure of "
    "the package rouge-score with its stemmer; ROUGE-L is over the text as a whole, "
    "ROUGE-Lsum over its lines.",
    "The paper prints 39.85 for both CNN/DailyMail and NewsRoom, and for XSum 52.15, "
    "which is far above what the best models reach.",
]


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws Table 1 from records of quality and of BPD's drafts."""
    scores = {task: _scores(run, task) for task in tasks_of(run)}
    return study.show(
        run,
        tables=[_table(run, scores), *_all_scores(run, scores)],
        findings=_findings(run),
        notes=NOTES,
    )


Scores = dict[str, list[dict[str, float]]]


def _scores(run: StudyRun, task: str) -> list[dict[str, float]]:
    return [
        record.scores
        for record in run.of(QualityRecord)
        if record.task == task and record.part == REPORT
    ]


def _score_cell(
    name: str, scores: Sequence[dict[str, float]], paper: float | None
) -> Cell:
    found = estimate(name, scores)
    if found is None:
        return missing_cell(paper)
    return Cell(found.value, paper, found.interval)


def _label(name: str) -> str:
    return LABELS[name] if name in PERPLEXITIES else f"{LABELS[name]}, %"


def _printed(task: str, name: str) -> float | None:
    """The paper's quality of a task, if that is the score it prints."""
    if printed.METRICS.get(task) != name:
        return None
    return printed.TABLE1[task]["quality"]


def _table(run: StudyRun, scores: Scores) -> Table:
    contenders = _by_heads(run)
    columns = [
        Column("metric"),
        Column("score"),
        Column("examples", digits=0),
        *(Column(label, group="block efficiency") for label in contenders.values()),
    ]
    rows = []
    for task, found in scores.items():
        name = headline_of(task)
        if name is None:
            quality = [Cell(text="none"), Cell(text="-"), Cell(text="-")]
        else:
            quality = [
                Cell(text=_label(name)),
                _score_cell(name, found, _printed(task, name)),
                Cell(float(len(found))),
            ]
        drafted = [
            efficiency_cell(
                drafts_of(run, contender, task), _printed_efficiency(task, contender)
            )
            for contender in contenders
        ]
        rows.append(Row(run.task_label(task), [*quality, *drafted]))
    return Table(
        "table1",
        "Quality of the texts and block efficiency of blockwise parallel decoding",
        "task",
        columns,
        rows,
        "Scores with bootstrap intervals of 95 % over examples. Drafting changes no "
        "text, so quality is that of plain decoding.",
    )


def _by_heads(run: StudyRun) -> dict[str, str]:
    """Labels of BPD with its first 3, 6, … heads as far as recorded, then with all."""
    found = {
        int(match[1]): record.contender
        for record in run.of(DraftRecord)
        if (match := re.fullmatch(rf"{BPD}:heads=(\d+)", record.contender))
    }
    fewer = {found[heads]: f"{heads} heads" for heads in sorted(found)}
    return {
        **fewer,
        BPD: run.facts.get("labels", {}).get(BPD, "BPD"),
    }


def _printed_efficiency(task: str, contender: str) -> float | None:
    """What the paper prints for as many heads; all of them are nine there."""
    heads = contender.partition("heads=")[2] or "9"
    return printed.TABLE10.get(task, {}).get(heads)


def _all_scores(run: StudyRun, scores: Scores) -> list[Table]:
    rows = [
        Row(
            f"{run.task_label(task)}: {_label(name)}",
            [_score_cell(name, found, _printed(task, name)), Cell(float(len(found)))],
        )
        for task, found in scores.items()
        for name in LABELS
        if estimate(name, found) is not None
    ]
    columns = [Column("score"), Column("examples", digits=0)]
    if not rows:
        return []
    return [Table("table1_scores", "All scores", "task and score", columns, rows)]


def _findings(run: StudyRun) -> list[Finding]:
    """Whether the tasks that BPD drafts best and worst are the paper's."""
    values = by_task(run, BPD)
    found = {task: values[task] for task in printed.TASKS if task in values}
    ranked = sorted(found, key=lambda task: -found[task])
    holds = None
    if len(found) == len(printed.TASKS):
        holds = ranked[0] == printed.LAMBADA and ranked[-1] == printed.NEWSROOM
    evidence = ", ".join(f"{run.task_label(task)} {found[task]:.2f}" for task in ranked)
    best, worst = (
        printed.TABLE10[task]["9"] for task in (printed.LAMBADA, printed.NEWSROOM)
    )
    return [
        Finding(
            "LAMBADA has the highest block efficiency of the seven tasks, and NewsRoom "
            "the lowest.",
            holds,
            f"Here: {evidence}. In the paper {best:.2f} and {worst:.2f}."
            if evidence
            else "No drafts of BPD were recorded.",
        )
    ]


STUDY = Study(
    "table1",
    "Quality and block efficiency",
    "Table 1",
    "How good are the model's texts on each task, and how many tokens does a serial "
    "call of blockwise parallel decoding yield?",
    present,
    measures=(QUALITY, DRAFTS),
)
