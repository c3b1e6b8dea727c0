"""Table 7: rescorers of the task's own texts against general ones."""

from bpd_jax.reporting.exhibits import Exhibit, Finding
from bpd_jax.studies.comparisons import (
    efficiency_table,
    gain_table,
    headroom_table,
    never_below,
)
from bpd_jax.studies.config import parse_contender
from bpd_jax.studies.printed import TABLE7
from bpd_jax.studies.results import by_task, contenders_of
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study

IN_DOMAIN, GENERAL = "in_domain", "general"
NOTES = [
    "In-domain models learn from texts of the task that are neither reported nor tuned "
    "on, as many as the setting in_domain says and the samples hold, the paper's from "
    "whole training sets. Tokens that never occur in them are unigrams of "
    "log-probability -1000, as in the paper's appendix D.",
]
_NO_NEURAL = (
    "Of the paper's table only the n-gram half is here: no small language model of a "
    "task's texts is among what was compared."
)
_NEURAL = "Rescorers of a task go on from the general one with the task's texts."


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws block efficiencies and gains."""
    contenders = contenders_of(run)
    kinds = {parse_contender(name).method.kind for name in contenders}
    notes = [*NOTES, _NEURAL if "neural" in kinds else _NO_NEURAL]
    return study.show(
        run,
        tables=[
            efficiency_table(run, "table7", contenders, TABLE7),
            gain_table(run, "table7_gain", contenders, {}),
            *headroom_table(run, "table7_headroom", contenders),
        ],
        findings=_findings(run, contenders),
        notes=[*notes, *_counted(run)],
    )


def _counted(run: StudyRun) -> list[str]:
    """How many texts each in-domain model was counted from."""
    texts = run.facts.get("in_domain", {})
    listed = ", ".join(f"{run.task_label(task)} {n:,}" for task, n in texts.items())
    return [f"Texts that in-domain models learnt from: {listed}."] if texts else []


def _findings(run: StudyRun, contenders: list[str]) -> list[Finding]:
    findings = []
    for name in contenders:
        contender = parse_contender(name)
        if not (contender.assets or "").startswith(IN_DOMAIN):
            continue
        for other in contenders:
            general = parse_contender(other)
            if general.method != contender.method:
                continue
            if not (general.assets or "").startswith(GENERAL):
                continue
            findings.append(
                never_below(
                    run,
                    "On most tasks a general model does at least as well as one of the "
                    f"task's own texts ({run.label(other)} against {run.label(name)}).",
                    by_task(run, other),
                    by_task(run, name),
                    mostly=True,
                )
            )
    return findings


STUDY = Study(
    "table7",
    "In-domain and general rescorers",
    "Table 7",
    "Is it better to learn from the very task, from few texts, or from many general "
    "ones?",
    present,
)
