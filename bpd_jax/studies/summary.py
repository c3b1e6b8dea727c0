"""From records of many examples to the entries of a table."""

from collections.abc import Sequence

import numpy as np

from bpd_jax.evaluation.efficiency import gain_interval, ratio_interval
from bpd_jax.reporting.exhibits import Cell
from bpd_jax.studies.records import (
    REPORT,
    DraftRecord,
    call_positions,
    from_digits,
)
from bpd_jax.studies.run_files import StudyRun


def tasks_of(run: StudyRun) -> list[str]:
    """The tasks of a run, in the order of its configuration."""
    return list(run.facts.get("tasks", {}))


def drafts_of(
    run: StudyRun, contender: str, task: str | None = None, part: str = REPORT
) -> list[DraftRecord]:
    """What one contender drafted, in the order of tasks and examples.

    Args:
      run: of a study.
      contender: its name.
      task: one task; None for all.
      part: of the examples.
    """
    order = {name: index for index, name in enumerate(tasks_of(run))}
    found = [
        record
        for record in run.of(DraftRecord)
        if record.contender == contender
        and record.part == part
        and (task is None or record.task == task)
    ]
    return sorted(found, key=lambda r: (order.get(r.task, len(order)), r.example))


def sums(records: Sequence[DraftRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and serial calls of every example."""
    tokens = np.array([record.tokens for record in records], int)
    return tokens, np.array([record.calls for record in records], int)


def efficiency(records: Sequence[DraftRecord]) -> float | None:
    """Block efficiency over some examples; None of none."""
    tokens, calls = sums(records)
    return float(tokens.sum() / calls.sum()) if len(records) else None


def efficiency_cell(records: Sequence[DraftRecord], paper: float | None = None) -> Cell:
    """Block efficiency with its bootstrap interval over examples."""
    if not records:
        return Cell(paper=paper, text="not measured")
    interval = ratio_interval(*sums(records)) if len(records) > 1 else None
    return Cell(efficiency(records), paper, interval)


def gain_cell(
    records: Sequence[DraftRecord],
    base: Sequence[DraftRecord],
    paper: float | None = None,
) -> Cell:
    """Gain in block efficiency over `base` in percent, with its paired interval.

    Both hold the same examples, in the same order.
    """
    mine, theirs = efficiency(records), efficiency(base)
    if mine is None or theirs is None:
        return Cell(paper=paper, text="not measured")
    gain = 100 * (mine / theirs - 1)
    if len(records) == 1:
        return Cell(gain, paper)
    low, high = gain_interval(*sums(records), *sums(base))
    return Cell(gain, paper, (100 * low, 100 * high))


def repetition_of(
    records: Sequence[DraftRecord],
) -> tuple[float | None, float | None]:
    """Share of equal neighbours and mean longest run in the drafts of decoding.

    As `bpd_jax.evaluation.statistics.repetition` has them (paper section 6.1): over the
    calls that decoding makes, of drafts of two tokens and more.
    """
    pairs = equal = drafts = longest = 0
    for record in records:
        calls = call_positions(from_digits(record.accepted))
        length = from_digits(record.length)[calls]
        equal += int(from_digits(record.equal)[calls].sum())
        pairs += int((length - 1).sum())
        longest += int(from_digits(record.longest)[calls][length > 1].sum())
        drafts += int((length > 1).sum())
    return (equal / pairs, longest / drafts) if pairs else (None, None)
