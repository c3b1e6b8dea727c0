"""The entropy of a head as the condition to stop within a draft.

Appendix B proposes a "halting condition during block draft head training", which is
another question and not studied here.

Drafts of BPD are cut before the first head whose entropy is above a limit, and compared
with drafts of one length for which as many tokens are drafted.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from bpd_jax.evaluation.statistics import FEWEST, combined_verdict, exceeds
from bpd_jax.reporting.exhibits import Cell, Column, Finding, Table
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.study_records import (
    ENTROPY_STEP,
    REPORT,
    TUNE,
    DraftRecord,
    EntropyRecord,
    call_positions,
)
from bpd_jax.studies.tables import (
    by_row,
    counted,
    gain_cell,
    judged,
    ratio_cell,
    table,
    with_interval,
)

# Entropies of 2^17 tokens are lower.
_HIGHEST_LIMIT = 12.0


class _Stopped(NamedTuple):
    """Decoding with shorter drafts: sums over calls, for every text.

    Attributes:
      tokens, calls, drafted: tokens, calls, and tokens drafted in all calls, `[n]`.
    """

    tokens: np.ndarray
    calls: np.ndarray
    drafted: np.ndarray

    @property
    def drafted_per_call(self) -> float:
        """Mean number of drafted tokens of a call."""
        return float(self.drafted.sum() / self.calls.sum())


def stopped(records: Iterable[tuple[DraftRecord, np.ndarray]]) -> _Stopped:
    """Decodes texts with BPD's drafts, of which each position has a length of its own.

    Args:
      records: a record of BPD and the number of tokens to draft at each of its
        positions, `[T]`, without the certain one.
    """
    sums = []
    for record, lengths in records:
        yields = np.minimum(record.yields, 1 + lengths)
        at = call_positions(yields)
        sums.append((record.tokens, len(at), lengths[at].sum()))
    return _Stopped(*np.array(sums, int).reshape(-1, 3).T)


def stopping_tables(run: StudyRun) -> list[Table]:
    """Drafts that end at an uncertain head, against drafts of one length.

    The limit of the entropy is the highest one that drafts no more tokens per call on
    the tuning texts than a fixed number of heads.
    """
    entropies = {record.key: record.entropies for record in run.of(EntropyRecord)}
    by_part = {
        part: [
            (record, entropies[record.task, record.example])
            for record in run.drafts(BPD, part=part)
            if (record.task, record.example) in entropies
        ]
        for part in (TUNE, REPORT)
    }
    if not by_part[TUNE] or len(by_part[REPORT]) < FEWEST:
        return []
    heads = len(by_part[TUNE][0][1])

    def by_limit(part: str, limit: float) -> _Stopped:
        # Heads before the first whose entropy is above the limit.
        return stopped(
            (record, np.cumprod(entropies <= limit, axis=0).sum(0))
            for record, entropies in by_part[part]
        )

    limits = np.arange(0.0, _HIGHEST_LIMIT, ENTROPY_STEP)
    tuned = {limit: by_limit(TUNE, limit).drafted_per_call for limit in limits}

    def cells(count: int) -> list[Cell]:
        fixed = stopped((r, np.full(r.tokens, count)) for r, _ in by_part[REPORT])
        limit = max(x for x, drafted in tuned.items() if drafted <= count)
        chosen = by_limit(REPORT, limit)
        return [
            ratio_cell((fixed.tokens, fixed.calls)),
            Cell(float(limit)),
            Cell(chosen.drafted_per_call),
            ratio_cell((chosen.tokens, chosen.calls)),
            gain_cell((chosen.tokens, chosen.calls), (fixed.tokens, fixed.calls)),
        ]

    columns = [
        Column("tokens per call", "fixed length"),
        Column("limit, nats", "until a head is uncertain"),
        Column("drafted per call", "until a head is uncertain"),
        Column("tokens per call", "until a head is uncertain"),
        Column("gain", digits=1, unit="+%"),
    ]
    rows = {count: counted(count, "token") for count in range(1, heads)}
    return [
        table(
            "questions_stopping",
            "Drafts that end before the first uncertain head, and drafts of one length",
            "drafted per call",
            rows,
            by_row(columns, cells),
            "Of unrefined drafts. The limit is the highest with which no more tokens "
            "are drafted per call on the tuning texts.",
        )
    ]


def stopping_pays(run: StudyRun) -> Finding:
    """Whether the limit on the entropy gains at every number of drafted tokens."""
    statement = (
        "Drafts that end before the first uncertain head yield more tokens per call "
        "than drafts of one length with as many tokens."
    )
    tables = stopping_tables(run)
    if not tables:
        return judged(statement, "Not measured.")
    gains = {row.label: row.cells[-1] for row in tables[0].rows}
    verdicts = [
        exceeds(cell.interval) for cell in gains.values() if cell.interval is not None
    ]
    evidence = "; ".join(f"{label} {with_interval(c)}" for label, c in gains.items())
    return Finding(statement, combined_verdict(verdicts), f"{evidence}.")
