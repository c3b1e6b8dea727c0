"""Table 1: quality of the texts, and block efficiency of BPD."""

import functools
import math
from collections.abc import Iterable

from bpd_jax.evaluation.metrics import (
    PERPLEXITIES,
    SCORE_LABELS,
    estimate,
    headline_of,
)
from bpd_jax.evaluation.statistics import combined_verdict
from bpd_jax.reporting.exhibits import Cell, Column, Table
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import DRAFTS, QUALITY, Study
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.study_records import REPORT, QualityRecord
from bpd_jax.studies.tables import Judgement, by_row, cell, finding, missing_cell, table
from experiments import printed
from experiments.comparisons import length_notes
from experiments.refinements import bpd_by_heads, method_of

_SCORE, _EXAMPLES = Column("score"), Column("examples", digits=0)
_REPEATED = Column("repeated 4-grams", digits=0, unit="%")


def _records(run: StudyRun, task: str) -> list[QualityRecord]:
    return [
        record
        for record in run.of(QualityRecord)
        if record.task == task and record.part == REPORT
    ]


def _scores(run: StudyRun, task: str) -> list[dict[str, float]]:
    return [record.scores for record in _records(run, task)]


def repeated_ngrams(texts: Iterable[str], order: int = 4) -> float | None:
    """Share of word n-grams that occurred before in the same text.

    >>> repeated_ngrams(["the first time, the first time, the", "new"], order=3)
    0.4

    Args:
      texts: texts, whose words are separated by white space.
      order: number of words of an n-gram.

    Returns:
      The share over all texts, or None if they have no n-gram.
    """
    total = distinct = 0
    for text in texts:
        words = text.split()
        ngrams = list(zip(*(words[start:] for start in range(order)), strict=False))
        total += len(ngrams)
        distinct += len(set(ngrams))
    return (total - distinct) / total if total else None


def _score_cells(run: StudyRun, task: str, name: str) -> list[Cell]:
    """A score, with the paper's if it prints that score, and the number of texts."""
    scores = _scores(run, task)
    value, paper = estimate(name, scores), None
    if name in printed.METRICS.get(task, ()):
        paper = printed.TABLE1[task]["quality"]
    score = (
        missing_cell(paper)
        if value is None
        else Cell(value.value, paper, value.interval)
    )
    return [score, Cell(float(len(scores)))]


def _label(name: str) -> str:
    return SCORE_LABELS[name] if name in PERPLEXITIES else f"{SCORE_LABELS[name]}, %"


def _table(run: StudyRun) -> Table:
    def quality(task: str) -> list[Cell]:
        name = headline_of(task)
        if name is None:
            return [Cell(text="none"), *[Cell(text="-")] * 5]
        texts = (record.prediction for record in _records(run, task))
        repeated = cell(repeated_ngrams(texts), scale=100, text="-")
        other = [Cell(text="-")] * 2
        for second in printed.METRICS.get(task, ())[1:]:
            other = [Cell(text=_label(second)), _score_cells(run, task, second)[0]]
        score, count = _score_cells(run, task, name)
        return [Cell(text=_label(name)), score, *other, count, repeated]

    def efficiency(contender: str, task: str) -> Cell:
        # In the paper, all heads are nine heads.
        heads = method_of(contender).setting("heads") or printed.HEADS
        paper = printed.TABLE10.get(task, {}).get(str(heads))
        return run.drafts(contender, task).cell(paper)

    # BPD with its first 3, 6, … heads, if recorded, then with all heads.
    by_heads = bpd_by_heads(run.contenders)
    numbers = sorted(number for number in by_heads if number is not None)
    labels = {by_heads[number]: f"{number} heads" for number in numbers}
    labels[BPD] = run.facts.get("labels", {}).get(BPD, "BPD")
    return table(
        "table1",
        "Quality of the texts and block efficiency of blockwise parallel decoding",
        "task",
        {task: run.task_label(task) for task in run.tasks},
        [
            *by_row(
                [
                    Column("metric"),
                    _SCORE,
                    Column("or metric"),
                    Column("its score"),
                    _EXAMPLES,
                    _REPEATED,
                ],
                quality,
            ),
            *(
                (Column(label, "block efficiency"), functools.partial(efficiency, name))
                for name, label in labels.items()
            ),
        ],
        "Scores with 95 % bootstrap intervals over examples. Drafting does not change "
        "the texts, so the quality is that of plain decoding. Where the paper does not "
        "say which of two metrics it prints, both stand beside its value. Repeated "
        "4-grams are those of four words that occurred before in the same text: a text "
        "that repeats itself is easy to draft.",
    )


def _all_scores(run: StudyRun) -> list[Table]:
    rows = {
        (task, name): f"{run.task_label(task)}: {_label(name)}"
        for task in run.tasks
        for name in SCORE_LABELS
        if estimate(name, _scores(run, task)) is not None
    }
    columns = by_row([_SCORE, _EXAMPLES], lambda key: _score_cells(run, *key))
    every = table("table1_scores", "All scores", "task and score", rows, columns)
    return [every] if rows else []


@finding(
    "LAMBADA has the highest block efficiency of the seven tasks, and NewsRoom the "
    "lowest."
)
def _extremes(run: StudyRun) -> Judgement | str:
    """Differences within noise leave the order of two tasks open."""
    cells = {task: run.drafts(BPD, task).cell() for task in printed.TASKS}
    values = {t: c.value for t, c in cells.items() if c.value is not None}
    if not values:
        return "No drafts of BPD were recorded."
    ranked = sorted(values, key=lambda task: -values[task])
    listed = ", ".join(f"{run.task_label(task)} {values[task]:.3f}" for task in ranked)
    best, worst = (
        printed.TABLE10[task]["9"] for task in (printed.LAMBADA, printed.NEWSROOM)
    )
    evidence = f"Here: {listed}. In the paper {best:.2f} and {worst:.2f}."
    if len(values) < len(printed.TASKS):
        return evidence
    orders = [
        (upper, lower, _above(cells[upper], cells[lower]))
        for upper, lower in [
            *((printed.LAMBADA, task) for task in printed.TASKS[1:]),
            *((task, printed.NEWSROOM) for task in printed.TASKS[1:-1]),
        ]
    ]
    open_pairs = [
        f"{run.task_label(upper)} and {run.task_label(lower)}"
        for upper, lower, order in orders
        if order is None
    ]
    if open_pairs:
        evidence += f" Within noise of each other: {', '.join(open_pairs)}."
    return combined_verdict([order for _, _, order in orders]), evidence


def _above(upper: Cell, lower: Cell) -> bool | None:
    """Whether one value is above another; None within noise.

    Noise is the root of the sum of the squares of both intervals' half widths: texts
    of two tasks are independent.
    """
    if upper.interval is None or lower.interval is None:
        return None
    assert upper.value is not None
    assert lower.value is not None
    halves = [(high - low) / 2 for low, high in (upper.interval, lower.interval)]
    difference = upper.value - lower.value
    return None if abs(difference) <= math.hypot(*halves) else difference > 0


STUDY = Study(
    "table1",
    "Quality and block efficiency",
    "Table 1",
    "What is the quality of the model's texts on each task, and how many tokens does a "
    "serial call of blockwise parallel decoding yield?",
    measures=(QUALITY, DRAFTS),
    tables=[_table, _all_scores],
    findings=[_extremes],
    notes=[
        length_notes,
        "The paper finetunes a model of 1.5 billion parameters on every task except "
        "LAMBADA. A model that was not finetuned, such as SmolLM2, answers in complete "
        "sentences, which exact match counts as wrong: F1 is more informative. Texts "
        "that were truncated at the token limit are scored without correction.",
        "Perplexity is per token of the model's vocabulary, so values of different "
        "vocabularies are not comparable; the paper's has 50,257 tokens. The paper "
        "does not say whether its 7.88 is over the tokens of a passage, here all but "
        "the first, or over those of its last word, which is more usual for LAMBADA "
        "and which the value fits better. A last word counts as correct if greedy "
        "decoding produces it.",
        "Exact match and F1 follow the official script of SQuAD. ROUGE is the "
        "F-measure of the package rouge-score; ROUGE-L is computed over the complete "
        "text, ROUGE-Lsum over its lines, with the package's stemmer unless stated "
        "otherwise. The paper does not name its variant; T5's is ROUGE-Lsum, not "
        "stemmed.",
        "The paper reports 39.85 for both CNN/DailyMail and NewsRoom, and 52.15 for "
        "XSum, far above the best published models.",
    ],
)
