"""Tables 4 and 9: block efficiency of every refinement, on every task."""

from bpd_jax.reporting.exhibits import Finding
from bpd_jax.studies.comparisons import (
    efficiency_table,
    gain_table,
    headroom_table,
    never_below,
    weak_gain_most,
)
from bpd_jax.studies.printed import TABLE4
from bpd_jax.studies.refinements import method_of
from bpd_jax.studies.results import StudyRun, drafts_from_lattice
from bpd_jax.studies.study import Study
from bpd_jax.studies.study_config import BPD


def _findings(run: StudyRun) -> list[Finding]:
    zero, several = (_of_several(run, kind) for kind in ("zero_gram", "ngram"))
    single = several.replace(f":{method_of(several or BPD).count}", ":1", 1)
    chosen = f" ({run.label(several)})" if several else ""
    base, refined = run.by_task(BPD), run.by_task(several)
    statement = "The p best 0-gram drafts yield at least what BPD does."
    findings = [never_below(run, statement, zero, base)]
    statement = f"The p best n-gram drafts yield at least what 0-gram ones do{chosen}."
    findings.append(never_below(run, statement, refined, zero))
    statement = f"The p best n-gram drafts beat the single best{chosen}."
    findings.append(never_below(run, statement, refined, single, strictly=True))
    statement = f"Tasks with a low block efficiency of BPD gain most{chosen}."
    findings.append(weak_gain_most(statement, base, refined))
    return findings + _bound(run)


def _of_several(run: StudyRun, kind: str) -> str:
    """A contender of several drafts, preferably one that the paper has too; or ""."""
    names = [
        name
        for name in run.contenders
        if method_of(name).kind == kind and method_of(name).count > 1
    ]
    printed = run.facts.get("printed", {})
    return next((name for name in names if name in printed), [*names, ""][0])


def _bound(run: StudyRun) -> list[Finding]:
    """The oracle against the best of all contenders from its lattice, by task."""
    oracle = run.oracle
    if oracle is None:
        return []
    best: dict[str, float] = {}
    for name in run.contenders:
        if drafts_from_lattice(method_of(name)):
            for task, value in run.by_task(name).items():
                best[task] = max(value, best.get(task, 0.0))
    statement = "The oracle bounds every choice of drafts."
    return [never_below(run, statement, oracle, best)]


STUDY = Study(
    "table4",
    "Block efficiency of refined drafts",
    "Tables 4 and 9",
    "How many tokens does a serial call yield with the heads' own drafts, with drafts "
    "refined by n-grams and small language models, with the p best, and at most?",
    tables=[efficiency_table(TABLE4), gain_table(TABLE4), headroom_table],
    findings=[_findings],
    notes=[
        "The paper's model has 1.5 billion parameters, and was trained on C4 with its "
        "heads and finetuned on each task but LAMBADA. Our model is named with the "
        "facts of the run: compare the direction of its numbers with the paper's, not "
        "their size.",
        "The paper's oracle over 2 candidates lies below BPD on SAMSum (1.23, 1.27). "
        "At every position it yields at least as many tokens as BPD, whose candidate "
        "is the first of the 2.",
    ],
)
