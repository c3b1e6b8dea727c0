"""Table 10: block efficiency with 3, 6 and 9 heads."""

import itertools
import math

from bpd_jax.decoding.methods import Method
from bpd_jax.reporting.exhibits import Finding
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import Study
from experiments.comparisons import (
    efficiency_table,
    headroom_table,
    length_notes,
    never_below,
)
from experiments.printed import TABLE10
from experiments.refinements import method_of


def _findings(run: StudyRun) -> list[Finding]:
    """Compares every method with more heads and with fewer heads."""
    families: dict[Method, list[str]] = {}
    for name in run.contenders:
        method = method_of(name)
        if not method.is_oracle:
            families.setdefault(method.without("heads"), []).append(name)
    return [
        never_below(
            run,
            f"More heads help: {run.label(many)} against {run.label(few)}.",
            *run.by_task(many, few),
            strictly=True,
        )
        for family in families.values()
        for few, many in itertools.pairwise(
            # Without the setting all heads draft.
            sorted(family, key=lambda n: method_of(n).setting("heads") or math.inf)
        )
    ]


STUDY = Study(
    "table10",
    "3, 6 and 9 heads",
    "Table 10",
    "How does block efficiency depend on the number of heads?",
    tables=[efficiency_table(TABLE10), headroom_table],
    findings=[_findings],
    notes=[
        length_notes,
        "The first 3 or 6 heads of the same model are used. The paper does not specify "
        "whether it trained models with fewer heads; experiments/heads has "
        "configurations for that.",
        "The paper reports only BPD. With p drafts, fewer heads may be better: the p "
        "best drafts then differ in their first tokens rather than in their last ones.",
    ],
)
