"""What a study is: a name, what it asks, and how its records become an exhibit."""

import dataclasses
from collections.abc import Callable
from typing import Any

from bpd_jax.reporting.exhibits import Exhibit
from bpd_jax.studies.config import class_of, parse_contender
from bpd_jax.studies.run_files import StudyRun

DRAFTS, ORACLE, EXPLORER, QUALITY, TIMING, LATENCY = MEASURES = (
    "drafts",
    "oracle",
    "explorer",
    "quality",
    "timing",
    "latency",
)
DRAFTING = frozenset((DRAFTS, EXPLORER, TIMING))
"""Those for which contenders draft, so that their weights α matter."""


@dataclasses.dataclass(frozen=True)
class Study:
    """A table or figure of the paper, or several that share their records.

    Attributes:
      name: of the study, its folder under experiments/ and its gin files.
      title: heading of its section.
      paper: tables and figures of the paper, such as "Tables 4 and 9", or
        "Beyond the paper".
      question: what it asks, in a sentence or two.
      measures: what kinds of records it is drawn from; see `MEASURES`.
      present: draws the exhibit from records of a run; every number in it comes from
        those or is the paper's.
    """

    name: str
    title: str
    paper: str
    question: str
    present: Callable[["Study", StudyRun], Exhibit]
    measures: tuple[str, ...] = (DRAFTS,)

    def show(self, run: StudyRun, **contents: Any) -> Exhibit:
        """An exhibit of this study with the given tables, charts, findings …."""
        titles = (self.name, self.title, self.paper, self.question)
        return Exhibit(*titles, **contents, facts=run.facts)

    def exhibit(self, run: StudyRun) -> Exhibit:
        """The exhibit of a run."""
        found = self.present(self, run)
        weights = _weights(run) if DRAFTING & {*self.measures} else []
        notes = [*found.notes, *weights, *run.facts.get("notes", [])]
        return dataclasses.replace(found, notes=notes)


def _weights(run: StudyRun) -> list[str]:
    """A note on the weight α of the contenders that name none, if there are any."""
    kinds = {
        class_of(contender.method)
        for contender in map(parse_contender, run.facts.get("labels", {}))
        if contender.method.setting("alpha") is None
    }
    notes = []
    for kind, label in (("ngram", "N-gram"), ("neural", "Neural")):
        if kind not in kinds:
            continue
        tuned = run.facts.get("alphas", {}).get(kind)
        words = "α = 1, which was not tuned"
        if tuned:
            words = "α tuned on examples that are not reported: " + ", ".join(
                f"{run.task_label(task)} {alpha:g}" for task, alpha in tuned.items()
            )
        notes.append(f"{label} rescorers that name no α have {words}.")
    return notes
