"""Table 7: rescorers of the task's own texts against general ones."""

from bpd_jax.reporting.exhibits import Finding
from bpd_jax.studies.comparisons import (
    efficiency_table,
    gain_table,
    headroom_table,
    never_below,
)
from bpd_jax.studies.config import parse_contender
from bpd_jax.studies.printed import TABLE7
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import Study

IN_DOMAIN, GENERAL = "in_domain", "general"


def _notes(run: StudyRun) -> list[str]:
    kinds = {parse_contender(name).method.kind for name in run.contenders}
    notes = [
        "Rescorers of a task go on from the general one with the task's texts."
        if "neural" in kinds
        else "Of the paper's table only the n-gram half is here: no small language "
        "model of a task's texts is among what was compared."
    ]
    texts = run.facts.get("in_domain", {})
    listed = ", ".join(f"{run.task_label(task)} {n:,}" for task, n in texts.items())
    return [
        *notes,
        *([f"Texts that in-domain models learnt from: {listed}."] if texts else []),
    ]


def _findings(run: StudyRun) -> list[Finding]:
    """Every method with a general model against the same with an in-domain one."""
    parsed = [parse_contender(name) for name in run.contenders]
    return [
        never_below(
            run,
            "On most tasks a general model does at least as well as one of the task's "
            f"own texts ({run.label(other.name)} against {run.label(one.name)}).",
            other.name,
            one.name,
            mostly=True,
        )
        for one in parsed
        for other in parsed
        if (one.assets or "").startswith(IN_DOMAIN)
        and (other.assets or "").startswith(GENERAL)
        and one.method == other.method
    ]


STUDY = Study(
    "table7",
    "In-domain and general rescorers",
    "Table 7",
    "Is it better to learn from the very task, from few texts, or from many general "
    "ones?",
    tables=[efficiency_table(TABLE7), gain_table({}), headroom_table],
    findings=[_findings],
    notes=[
        "In-domain models learn from texts of the task that are neither reported nor "
        "tuned on, as many as the setting in_domain says and the samples hold, the "
        "paper's from whole training sets. Tokens that never occur in them are "
        "unigrams of log-probability -1000, as in the paper's appendix D.",
        _notes,
    ],
)
