"""Table 10: block efficiency with 3, 6 and 9 heads."""

import itertools

from bpd_jax.reporting.exhibits import Exhibit, Finding
from bpd_jax.studies.comparisons import efficiency_table, headroom_table, never_below
from bpd_jax.studies.printed import TABLE10
from bpd_jax.studies.refinements import method_of
from bpd_jax.studies.results import by_task, contenders_of
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study

NOTES = [
    "With the first 3 or 6 heads of the same model. The paper does not say whether it "
    "trained models of fewer heads; experiments/heads has configurations for that.",
    "The paper has BPD alone. With p drafts fewer heads may do better: the p best then "
    "differ in the tokens that matter, not in those far ahead.",
]


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws block efficiencies of every method by number of heads."""
    contenders = contenders_of(run)
    return study.show(
        run,
        tables=[
            efficiency_table(run, "table10", contenders, TABLE10),
            *headroom_table(run, "table10_headroom", contenders),
        ],
        findings=_findings(run, contenders),
        notes=NOTES,
    )


def _findings(run: StudyRun, contenders: list[str]) -> list[Finding]:
    """Of every kind of method: more heads are no worse, and help less and less."""
    findings = []
    families: dict[tuple[str, int], list[str]] = {}
    for name in contenders:
        method = method_of(name)
        if method.is_oracle:
            continue
        families.setdefault((method.kind, method.count), []).append(name)
    for family in families.values():
        # Without a number it is all heads.
        order = sorted(
            family, key=lambda n: method_of(n).setting("heads") or float("inf")
        )
        values = [by_task(run, name) for name in order]
        steps = itertools.pairwise(zip(order, values, strict=True))
        for (few, less), (many, more) in steps:
            findings.append(
                never_below(
                    run,
                    f"More heads help: {run.label(many)} against {run.label(few)}.",
                    more,
                    less,
                    strictly=True,
                )
            )
    return findings


STUDY = Study(
    "table10",
    "3, 6 and 9 heads",
    "Table 10",
    "How far ahead is it worth guessing?",
    present,
)
