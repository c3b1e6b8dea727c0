"""The key figures at the top of the studies' page."""

from collections.abc import Sequence

from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.evaluation.efficiency import gain_interval, headroom_taken
from bpd_jax.reporting.formatting import percent
from bpd_jax.reporting.page import KeyFigure
from bpd_jax.studies.results import ContenderDrafts, StudyRun
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.tables import counted
from experiments.refinements import method_of

_MAIN = "table4"


def highlights(runs: Sequence[StudyRun]) -> list[KeyFigure]:
    """Block efficiency of BPD, the best method and the oracle, and the headroom taken.

    They are those of Table 4, or else of another study: of independent heads, as in
    the paper, with the most texts, the latest run.
    """
    measured = [run for run in runs if run.drafts(BPD)]
    return _figures(max(measured, key=_rank)) if measured else []


def _rank(run: StudyRun) -> tuple[bool, bool, int, str]:
    source = run.facts.get("settings", {}).get("source", "heads")
    texts = len(run.drafts(BPD))
    return run.study == _MAIN, source == "heads", texts, run.facts.get("date", "")


def _figures(run: StudyRun) -> list[KeyFigure]:
    base = run.drafts(BPD)
    plain = base.efficiency or 0.0
    tasks = len({record.task for record in base})
    size = run.facts.get("size")
    figures = [
        KeyFigure(
            f"BPD, {size}" if size else "BPD",
            f"{plain:.2f}",
            "tokens per serial call, unrefined; "
            f"{counted(len(base), 'text')} of {counted(tasks, 'task')}",
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
            f"{label}: {percent(refined / plain - 1)} "
            f"({percent(low)} … {percent(high)})",
        )
    )
    oracle = run.oracle
    paired = run.paired([name, BPD, oracle or BPD])
    efficiency, plain, bound = (drafts.efficiency or 0.0 for drafts in paired)
    if oracle is None or not bound:
        return figures
    figures.append(KeyFigure("Oracle", f"{bound:.2f}", run.label(oracle)))
    share = headroom_taken(efficiency, plain, bound)
    if share is not None:
        figures.append(
            KeyFigure(
                "Headroom taken",
                f"{100 * share:.0f} %".replace("-", "−"),
                f"of the difference between BPD and the oracle, by {label}",
            )
        )
    return figures


def _best(run: StudyRun, texts: int) -> tuple[str, ContenderDrafts]:
    """The best method among those recorded on all texts of BPD, and its drafts."""
    drafts = {
        name: run.paired([name, BPD])[0]
        for name in run.contenders
        if name != BPD and not method_of(name).is_oracle and method_of(name) != GREEDY
    }
    complete = [pair for pair in drafts.items() if len(pair[1]) == texts]
    return max(
        complete,
        key=lambda pair: pair[1].efficiency or 0,
        default=("", ContenderDrafts([])),
    )
