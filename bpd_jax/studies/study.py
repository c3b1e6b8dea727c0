"""A study: a name, a question, and how its exhibit is made of its records."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bpd_jax.reporting.exhibits import Exhibit
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study_config import class_of, parse_contender

DRAFTS, ORACLE, EXPLORER, QUALITY, TIMING, LATENCY = MEASURES = (
    "drafts",
    "oracle",
    "explorer",
    "quality",
    "timing",
    "latency",
)
DRAFTING = frozenset((DRAFTS, EXPLORER, TIMING))
"""Measurements in which contenders draft, so that their weights α matter."""

Part = Callable[[Any], Any]
"""Makes tables, charts, findings or notes of the prepared records: one or a list."""


@dataclasses.dataclass(frozen=True)
class Study:
    """A table or figure of the paper, or several that share their records.

    Attributes:
      name: of the study, its folder under experiments/ and its gin files.
      title: heading of its section.
      paper: tables and figures of the paper, such as "Tables 4 and 9", or
        "Beyond the paper".
      question: the question that it answers, in a sentence or two.
      measures: the kinds of records that it needs; see `MEASURES`.
      prepare: computes what several parts share from a run; the run itself by default.
      tables, charts, lattices, findings: functions of what `prepare` returns. Every
        number in them comes from the run's records or from the paper.
      notes: sentences, or functions that make them.
    """

    name: str
    title: str
    paper: str
    question: str
    measures: tuple[str, ...] = (DRAFTS,)
    prepare: Callable[[StudyRun], Any] = lambda run: run
    tables: Sequence[Part] = ()
    charts: Sequence[Part] = ()
    lattices: Sequence[Part] = ()
    findings: Sequence[Part] = ()
    notes: Sequence[str | Part] = ()

    def exhibit(self, run: StudyRun) -> Exhibit:
        """The exhibit of a run."""
        data = self.prepare(run)

        def made(parts: Iterable[str | Part]) -> list[Any]:
            results = [part(data) if callable(part) else part for part in parts]
            return [
                entry
                for result in results
                for entry in (result if isinstance(result, list) else [result])
            ]

        weights = _weights(run) if DRAFTING & {*self.measures} else []
        return Exhibit(
            self.name,
            self.title,
            self.paper,
            self.question,
            tables=made(self.tables),
            charts=made(self.charts),
            lattices=made(self.lattices),
            findings=made(self.findings),
            notes=[*made(self.notes), *weights, *run.facts.get("notes", [])],
            facts=run.facts,
        )


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
        words = "α = 1, not tuned"
        if tuned:
            words = "α tuned on examples that are not reported: " + ", ".join(
                f"{run.task_label(task)} {alpha:g}" for task, alpha in tuned.items()
            )
        notes.append(f"{label} rescorers without an α of their own use {words}.")
    return notes
