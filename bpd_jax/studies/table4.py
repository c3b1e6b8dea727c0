"""Tables 4 and 9: block efficiency of every way of refining, on every task."""

from bpd_jax.reporting.exhibits import Exhibit, Finding
from bpd_jax.studies.comparisons import (
    efficiency_table,
    gain_table,
    headroom_table,
    never_below,
    weak_gain_most,
)
from bpd_jax.studies.config import BPD
from bpd_jax.studies.printed import TABLE4
from bpd_jax.studies.refinements import method_of
from bpd_jax.studies.results import (
    by_task,
    contenders_of,
    drafts_from_lattice,
    oracle_of,
)
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study

NOTES = [
    "The paper's model has 1.5 billion parameters, and was trained on C4 with its "
    "heads and finetuned on each task but LAMBADA. Ours is what the run says; its "
    "numbers stand beside the paper's to be compared in direction, not in size.",
    "The paper's oracle over 2 candidates lies below BPD on SAMSum (1.23, 1.27). At no "
    "position can it yield less than BPD, whose candidate is the first of the 2.",
]


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws block efficiencies, gains and shares of the headroom."""
    contenders = contenders_of(run)
    return study.show(
        run,
        tables=[
            efficiency_table(run, "table4", contenders, TABLE4),
            gain_table(run, "table4_gain", contenders, TABLE4),
            *headroom_table(run, "table4_headroom", contenders),
        ],
        findings=_findings(run, contenders),
        notes=NOTES,
    )


def _findings(run: StudyRun, contenders: list[str]) -> list[Finding]:
    values = {name: by_task(run, name) for name in contenders}
    base = values.get(BPD, {})
    several = {
        kind: _of_several(run, contenders, kind) for kind in ("zero_gram", "ngram")
    }
    zero = values.get(several["zero_gram"], {})
    ngram = values.get(several["ngram"], {})
    single = values.get(
        several["ngram"].replace(f":{_drafts(several['ngram'])}", ":1", 1), {}
    )
    chosen = f" ({run.label(several['ngram'])})" if several["ngram"] else ""
    findings = [
        never_below(
            run,
            "The p best 0-gram drafts yield at least what BPD does.",
            zero,
            base,
        ),
        never_below(
            run,
            f"The p best n-gram drafts yield at least what 0-gram ones do{chosen}.",
            ngram,
            zero,
        ),
        never_below(
            run,
            f"The p best n-gram drafts beat the single best{chosen}.",
            ngram,
            single,
            strictly=True,
        ),
        weak_gain_most(f"Tasks where BPD does badly gain most{chosen}.", base, ngram),
    ]
    oracle = oracle_of(run)
    if oracle is not None:
        bound = values[oracle]
        inside = [
            value
            for name, value in values.items()
            if name != oracle and drafts_from_lattice(method_of(name))
        ]
        best = {
            task: max(found)
            for task in bound
            if (found := [value[task] for value in inside if task in value])
        }
        findings.append(
            never_below(run, "The oracle bounds every choice of drafts.", bound, best)
        )
    return findings


def _of_several(run: StudyRun, contenders: list[str], kind: str) -> str:
    """A contender of several drafts; first of all one that the paper has too."""
    found = [
        name
        for name in contenders
        if method_of(name).kind == kind and method_of(name).count > 1
    ]
    printed = run.facts.get("printed", {})
    return next((name for name in found if name in printed), [*found, ""][0])


def _drafts(contender: str) -> int:
    return method_of(contender).count if contender else 1


STUDY = Study(
    "table4",
    "Block efficiency of refined drafts",
    "Tables 4 and 9",
    "How many tokens does a serial call yield with the heads' own drafts, with drafts "
    "refined by n-grams and small language models, with the p best, and at most?",
    present,
)
