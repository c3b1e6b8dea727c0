"""Questions that the reviewers of the paper asked, and that records can answer.

- Local rescoring: does the small LM read the tokens that it has chosen so far, or the
  original draft? (first review, question 2)
- Should the weight α depend on the entropy of a head? (its answer to question 1)
- Why do tasks differ? On the level of texts: is it the block efficiency of a text that
  decides how much refinement gains?
- What happens when all heads are uncertain?
- Can the entropy decide how many positions to draft? (Appendix B proposes it for the
  training of heads.)

A text's gain and its block efficiency share the number of calls of BPD, so that noise
alone makes them correlate. The correlations here are between the halves of a text: the
block efficiency of one half and the gain on the other.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy import stats

from bpd_jax.evaluation.efficiency import bootstrap
from bpd_jax.evaluation.statistics import FEWEST, exceeds
from bpd_jax.reporting.exhibits import Cell, Column, Finding, Table
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import DRAFTS, ENTROPY, Study
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.study_records import (
    REPORT,
    TUNE,
    DraftRecord,
    call_positions,
)
from bpd_jax.studies.tables import (
    by_row,
    decimal,
    judged,
    missing_cell,
    table,
)
from experiments.comparisons import beats
from experiments.questions.stopping import stopping_pays, stopping_tables
from experiments.refinements import is_refined, method_of, with_same_models

# Shorter texts are not divided.
_SHORTEST = 16
_THIRDS = ("lowest third", "middle third", "highest third")


def _counterparts(run: StudyRun, setting: str) -> Iterator[tuple[str, str]]:
    """Contenders with a setting, each with the contender that differs only in it."""
    for name in run.contenders:
        method = method_of(name)
        if method.setting(setting) is not None:
            base = with_same_models(name, method.without(setting), run.contenders)
            if base is not None:
                yield name, base


def _conditioning(run: StudyRun) -> list[Finding]:
    """Local rescoring given its own tokens against given the original draft."""
    statement = (
        "Local rescoring that reads the rescored tokens beats rescoring that reads the "
        "original ones ({})."
    )
    return [
        beats(run, statement.format(run.label(sequential)), sequential, parallel)
        for parallel, sequential in _counterparts(run, "mode")
        if method_of(parallel).setting("mode") == "parallel"
    ]


def _weights(run: StudyRun) -> list[Finding]:
    """α that increases with the entropy; the slope is chosen on the tuning texts."""
    slopes: dict[str, list[str]] = {}
    for sloped, base in _counterparts(run, "slope"):
        slopes.setdefault(base, []).append(sloped)
    findings = []
    for base, others in slopes.items():
        tuned = run.paired([base, *others], part=TUNE)
        statement = f"α that depends on the entropy beats the tuned α ({base})."
        if not len(tuned[0]):
            findings.append(judged(statement, "Not measured on the tuning texts."))
            continue
        best = max(
            zip([base, *others], tuned, strict=True),
            key=lambda pair: pair[1].efficiency or 0.0,
        )[0]
        if best == base:
            finding = Finding(
                statement, False, "On the tuning texts a constant α is the best."
            )
        else:
            finding = beats(run, f"{statement[:-1]}, chosen: {best}.", best, base)
        findings.append(finding)
    return findings


class _Texts(NamedTuple):
    """Texts of at least `_SHORTEST` tokens, by their two halves.

    Attributes:
      efficiency: block efficiency of BPD, `[2, n]`.
      ratio: calls of BPD divided by calls with refinement, `[2, n]`.
      repetition: equal neighbours per position in BPD's drafts, `[2, n]`.
      task: index of the task, `[n]`.
    """

    efficiency: np.ndarray
    ratio: np.ndarray
    repetition: np.ndarray
    task: np.ndarray


def halves(base: DraftRecord, refined: DraftRecord) -> np.ndarray:
    """Block efficiency, ratio of calls and repetition of both halves, `[3, 2]`."""
    middle = base.tokens // 2
    values = []
    for part in (slice(0, middle), slice(middle, base.tokens)):
        calls, fewer = (
            len(call_positions(record.yields[part])) for record in (base, refined)
        )
        tokens = len(base.yields[part])
        repeats = float(base.repeats[part].mean())
        values.append((tokens / calls, calls / fewer, repeats))
    return np.array(values).T


def _texts(run: StudyRun, contender: str) -> _Texts:
    values, tasks = [], []
    for base, refined in zip(*run.paired([BPD, contender]), strict=True):
        if base.tokens >= _SHORTEST:
            values.append(halves(base, refined))
            tasks.append(run.tasks.index(base.task))
    efficiency, ratio, repetition = (
        np.array(values).reshape(-1, 3, 2).transpose(1, 2, 0)
    )
    return _Texts(efficiency, ratio, repetition, np.array(tasks, int))


def _ranks(values: np.ndarray, task: np.ndarray | None) -> np.ndarray:
    """Ranks in [0, 1] minus their mean, over all texts or within each task."""
    groups = [np.arange(len(values))]
    if task is not None:
        groups = [np.flatnonzero(task == index) for index in np.unique(task)]
    ranks = np.zeros(len(values))
    for group in groups:
        rank = stats.rankdata(values[group]) / len(group)
        ranks[group] = rank - rank.mean()
    return ranks


def split_correlation(
    texts: _Texts, *, within: bool = False, given_repetition: bool = False
) -> Cell:
    """Rank correlation of block efficiency and gain between the halves of texts.

    The mean of both directions, with its bootstrap interval over texts.

    Args:
      within: whether ranks are within each task, which removes what tasks differ in,
        such as their share in the training texts.
      given_repetition: whether repetition is regressed out of both.
    """
    if len(texts.task) < FEWEST:
        return missing_cell(text="too few texts")
    task = texts.task if within else None
    pairs = []
    for half in (0, 1):
        pair = [
            _ranks(texts.efficiency[half], task),
            _ranks(texts.ratio[1 - half], task),
        ]
        if given_repetition:
            other = _ranks(texts.repetition[half], task)
            scale = max(float(other @ other), 1e-12)
            pair = [ranks - other * (other @ ranks) / scale for ranks in pair]
        pairs.append(pair)

    def correlation(drawn: np.ndarray) -> np.ndarray:
        values = []
        for first, second in pairs:
            x, y = first[drawn], second[drawn]
            x = x - x.mean(-1, keepdims=True)
            y = y - y.mean(-1, keepdims=True)
            with np.errstate(invalid="ignore", divide="ignore"):
                norm = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
                values.append((x * y).sum(-1) / norm)
        mean: np.ndarray = np.mean(values, axis=0)
        return mean

    count = len(texts.task)
    value = float(correlation(np.arange(count)[None])[0])
    if np.isnan(value):
        return missing_cell(text="no differences")
    return Cell(value, interval=bootstrap(correlation, count))


def _refined(run: StudyRun) -> list[str]:
    return [name for name in run.contenders if is_refined(method_of(name))]


def _correlations(run: StudyRun) -> Table:
    """Correlations of block efficiency and gain, for every refinement."""
    settings: dict[str, dict[str, bool]] = {
        "over all texts": {},
        "within tasks": {"within": True},
        "within tasks, given repetition": {"within": True, "given_repetition": True},
    }

    def cells(name: str) -> list[Cell]:
        texts = _texts(run, name)
        return [split_correlation(texts, **each) for each in settings.values()]

    return table(
        "questions_texts",
        "Rank correlation of a text's block efficiency and gain, between its halves",
        "refinement",
        {name: run.label(name) for name in _refined(run)},
        by_row([*map(Column, settings)], cells),
    )


def _weak_texts(run: StudyRun) -> list[Finding]:
    findings = []
    for name in _refined(run):
        statement = f"Within a task, weak texts gain most ({run.label(name)})."
        cell = split_correlation(_texts(run, name), within=True)
        if cell.interval is None:
            findings.append(judged(statement, "Too few texts."))
            continue
        above = exceeds(cell.interval)
        low, high = (decimal(end, sign=True) for end in cell.interval)
        evidence = f"Rank correlation {decimal(cell.value or 0.0)} ({low} … {high})."
        findings.append(
            Finding(statement, None if above is None else not above, evidence)
        )
    return findings


def _uncertain(run: StudyRun) -> list[Table]:
    """Block efficiency and gains by the mean entropy of all drafting heads."""
    names = [BPD, *_refined(run)]
    drafts = run.paired(names)
    entropy = np.array([np.mean(record.head_entropy or np.nan) for record in drafts[0]])
    if len(entropy) < FEWEST or not np.isfinite(entropy).all():
        return []
    third = np.minimum(stats.rankdata(entropy, "ordinal") * 3 // (len(entropy) + 1), 2)

    def cells(index: int) -> list[Cell]:
        chosen = np.flatnonzero(third == index)
        groups = [
            type(one)([one.records[text] for text in chosen.tolist()]) for one in drafts
        ]
        base = groups[0]
        mean = Cell(float(entropy[chosen].mean()))
        return [mean, base.cell(), *(group.gain(base) for group in groups[1:])]

    columns = [Column("nats", digits=1), Column("tokens per call, BPD")]
    columns += [Column(run.label(name), digits=1, unit="+%") for name in names[1:]]
    return [
        table(
            "questions_uncertain",
            "Texts by the mean entropy of their heads: block efficiency and gains",
            "texts",
            dict(enumerate(_THIRDS)),
            by_row(columns, cells),
        )
    ]


STUDY = Study(
    "questions",
    "Questions of the reviewers",
    "Reviews and rebuttal",
    "Does local rescoring read its own tokens? Should α depend on entropy? Which texts "
    "gain from refinement, and what happens when all heads are uncertain?",
    example_parts=(TUNE, REPORT),
    measures=(DRAFTS, ENTROPY),
    tables=[_correlations, _uncertain, stopping_tables],
    findings=[_conditioning, _weights, _weak_texts, stopping_pays],
    notes=[
        "The gain of a text is BPD's number of calls divided by that with refinement. "
        "It is correlated with the block efficiency of the other half of the text: of "
        "the same half both contain BPD's calls, whose noise would correlate.",
        "Ranks within tasks remove everything in which tasks differ, such as their "
        "share of the texts that drafters and n-grams were trained on.",
        "α is tuned for one draft under n-grams and for rescoring that reads its own "
        "tokens, and used for several drafts and for rescoring that reads the original "
        "ones: where a slope wins for several drafts, a larger α might, too.",
        "Intervals are 95 % bootstrap intervals over texts.",
    ],
)
