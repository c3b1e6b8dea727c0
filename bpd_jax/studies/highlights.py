"""The key figures of all studies."""

from collections.abc import Sequence

from bpd_jax.evaluation.efficiency import gain_interval, headroom_taken
from bpd_jax.reporting.page import KeyFigure
from bpd_jax.studies.results import ContenderDrafts, StudyRun
from bpd_jax.studies.study_config import BPD

_MAIN = "table4"


def highlights(runs: Sequence[StudyRun]) -> list[KeyFigure]:
    """Block efficiency without and with refinement, the oracle's, and what is taken.

    Of Table 4's run, or else of the first that has drafts of BPD.

    Args:
      runs: in the order of the page.
    """
    for run in sorted(runs, key=lambda run: run.study != _MAIN):
        if run.drafts(BPD):
            return _figures(run)
    return []


def _figures(run: StudyRun) -> list[KeyFigure]:
    base = run.drafts(BPD)
    plain = base.efficiency or 0.0
    tasks = len({record.task for record in base})
    figures = [
        KeyFigure(
            "BPD",
            f"{plain:.2f}",
            f"tokens per serial call, unrefined; {len(base)} texts of {tasks} "
            f"task{'s' * (tasks > 1)}",
        )
    ]
    name, best = _best(run, len(base))
    if not len(best):
        return figures
    refined, label = best.efficiency or 0.0, run.label(name)
    low, high = gain_interval(*best.sums, *base.sums)
    figures.append(
        KeyFigure(
            "Best of Table 4" if run.study == _MAIN else "Best method",
            f"{refined:.2f}",
            f"{label}: {_percent(refined / plain - 1)} "
            f"({_percent(low)} … {_percent(high)})",
        )
    )
    oracle = run.oracle
    together = run.paired([name, BPD, oracle or BPD])
    mine, theirs, bound = (drafts.efficiency for drafts in together)
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


def _best(run: StudyRun, texts: int) -> tuple[str, ContenderDrafts]:
    """The best method of those recorded on every text that BPD was, and its drafts."""
    drafts = {
        name: run.paired([name, BPD])[0]
        for name in run.contenders
        if name != BPD and not name.startswith(("oracle", "greedy"))
    }
    whole = [(name, one) for name, one in drafts.items() if len(one) == texts]
    return max(
        whole,
        key=lambda pair: pair[1].efficiency or 0,
        default=("", ContenderDrafts([])),
    )
