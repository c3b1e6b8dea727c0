"""The few numbers of all studies that a reader should remember."""

from collections.abc import Sequence

from bpd_jax.evaluation.efficiency import gain_interval, headroom_taken
from bpd_jax.reporting.page import KeyFigure
from bpd_jax.studies.config import BPD
from bpd_jax.studies.records import DraftRecord
from bpd_jax.studies.results import (
    contenders_of,
    drafts_of,
    efficiency,
    oracle_of,
    paired,
    sums,
)
from bpd_jax.studies.run_files import StudyRun

_MAIN = "table4"


def highlights(runs: Sequence[StudyRun]) -> list[KeyFigure]:
    """Block efficiency without and with refinement, the oracle's, and what is taken.

    Of Table 4's run, or else of the first that has drafts of BPD.

    Args:
      runs: in the order of the page.
    """
    for run in sorted(runs, key=lambda run: run.study != _MAIN):
        if drafts_of(run, BPD):
            return _figures(run)
    return []


def _figures(run: StudyRun) -> list[KeyFigure]:
    base = drafts_of(run, BPD)
    plain = efficiency(base) or 0.0
    tasks = len({record.task for record in base})
    figures = [
        KeyFigure(
            "BPD",
            f"{plain:.2f}",
            f"tokens per serial call, unrefined; {len(base)} texts of {tasks} "
            f"task{'s' * (tasks > 1)}",
        )
    ]
    best = _best(run, len(base))
    if not best:
        return figures
    refined = efficiency(best) or 0.0
    label = run.label(best[0].contender)
    low, high = gain_interval(*sums(best), *sums(base))
    figures.append(
        KeyFigure(
            "Best of Table 4" if run.study == _MAIN else "Best method",
            f"{refined:.2f}",
            f"{label}: {_percent(refined / plain - 1)} "
            f"({_percent(low)} … {_percent(high)})",
        )
    )
    oracle = oracle_of(run)
    mine, theirs, bound = map(
        efficiency, paired(run, [best[0].contender, BPD, oracle or BPD])
    )
    if oracle is None or mine is None or theirs is None or bound is None:
        return figures
    figures.append(KeyFigure("Oracle", f"{bound:.2f}", run.label(oracle)))
    share = headroom_taken(mine, theirs, bound)
    if share is not None:
        figures.append(
            KeyFigure(
                "Headroom taken",
                f"{100 * share:.0f} %".replace("-", "−"),
                f"of the way from BPD to the oracle, by {label}",
            )
        )
    return figures


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


def _best(run: StudyRun, texts: int) -> list[DraftRecord]:
    """Drafts of the best method among those recorded on every text that BPD was."""
    found = [
        paired(run, [name, BPD])[0]
        for name in contenders_of(run)
        if name != BPD and not name.startswith(("oracle", "greedy"))
    ]
    whole = [drafts for drafts in found if len(drafts) == texts]
    return max(whole, key=lambda drafts: efficiency(drafts) or 0.0, default=[])
