"""Table 7: in-domain rescorers against general ones."""

from bpd_jax.reporting.exhibits import Finding
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.study_config import parse_contender
from experiments.comparisons import (
    beats,
    efficiency_table,
    gain_table,
    headroom_table,
    never_below,
)
from experiments.printed import TABLE7

IN_DOMAIN, GENERAL = "in_domain", "general"
# In-domain n-grams that are interpolated with unigrams of general text (appendix D).
MIXED = "in_domain_mixed"


def _notes(run: StudyRun) -> list[str]:
    methods = [parse_contender(name).method for name in run.contenders]
    notes = [
        "The rescorer of a task is the general one, finetuned on the task's texts."
        if any("neural" in method.refiner_names for method in methods)
        else "Only the n-gram half of the paper's table is measured: no contender has "
        "a small language model trained on a task's texts."
    ]
    if texts := run.facts.get("in_domain", {}):
        listed = ", ".join(f"{run.task_label(task)} {n:,}" for task, n in texts.items())
        notes.append(f"Training texts of the in-domain models: {listed}.")
    return notes


def _findings(run: StudyRun) -> list[Finding]:
    """Compares every method with a general model and with an in-domain one."""
    parsed = [parse_contender(name) for name in run.contenders]
    findings = [
        never_below(
            run,
            "On most tasks a general model is at least as good as an in-domain one "
            f"({run.label(general.name)} against {run.label(in_domain.name)}).",
            *run.by_task(general.name, in_domain.name),
            mostly=True,
        )
        for in_domain in parsed
        for general in parsed
        if (in_domain.assets or "").startswith(IN_DOMAIN)
        and (general.assets or "").startswith(GENERAL)
        and in_domain.method == general.method
    ]
    statement = (
        "N-grams of a task, interpolated with unigrams of general text, yield more "
        "than without them ({}; the authors: similar performance)."
    )
    return findings + [
        beats(run, statement.format(run.label(mixed.name)), mixed.name, plain.name)
        for mixed in parsed
        for plain in parsed
        if (mixed.assets, plain.assets) == (MIXED, IN_DOMAIN)
        and mixed.method == plain.method
    ]


STUDY = Study(
    "table7",
    "In-domain and general rescorers",
    "Table 7",
    "Is it better to train a rescorer on a few texts of the task, or on many general "
    "texts?",
    tables=[efficiency_table(TABLE7), gain_table({}), headroom_table],
    findings=[_findings],
    notes=[
        "In-domain models are trained on texts of the task that are neither reported "
        "nor tuned on; their number is limited by the setting in_domain and by the "
        "samples. The paper's are trained on complete training sets. Tokens that do "
        "not occur in these texts are unigrams with log-probability -1000, as in the "
        "paper's appendix D.",
        "In the paper's table, general 2-grams are at least as good as those of the "
        "task on SQuAD, CNN/DM and SAMSum, and slightly worse on MultiNews, XSum and "
        "NewsRoom; its text says that in-domain rescorers performed no better.",
        _notes,
    ],
)
