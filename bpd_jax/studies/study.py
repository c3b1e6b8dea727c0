"""A study: its question, its measurements, and the parts of its exhibit."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.reporting.exhibits import Exhibit
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study_config import class_of, parse_contender
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import REPORT, Record

DRAFTS, ENTROPY, ENGINES, ORACLE, EXPLORER, QUALITY, TIMING, LATENCY = MEASURES = (
    "drafts",
    "entropy",
    "engines",
    "oracle",
    "explorer",
    "quality",
    "timing",
    "latency",
)
DRAFTING = frozenset((DRAFTS, ENGINES, EXPLORER, TIMING))
"""Measurements in which contenders draft, so that their weights α matter."""

Done = set[tuple[Any, ...]]
"""The keys of records that are not measured again."""

Measurement = Callable[[StudyContext, Done], Iterator[Sequence[Record]]]
"""Yields groups of records, of which some may be done."""

# What exhibits raise for records whose numbers or shapes are wrong.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@contextlib.contextmanager
def readable(results: str, remedy: str) -> Iterator[None]:
    """Within it, what damaged records raise becomes one sentence."""
    try:
        yield
    except _DAMAGE as error:
        raise UserError(
            f"{results} are damaged or do not belong together "
            f"({type(error).__name__}: {error}): {remedy}."
        ) from error


Part = Callable[[Any], Any]
"""Returns a table, chart, finding or note, or a list of them, for the prepared data."""


@dataclasses.dataclass(frozen=True)
class Study:
    """A table or figure of the paper, or several that share their records.

    Attributes:
      name: name of the study, of its folder under experiments/ and of its gin files.
      title: heading of its section.
      paper: tables and figures of the paper, such as "Tables 4 and 9", or
        "Beyond the paper".
      question: the question of the study, in one or two sentences.
      measures: the kinds of records that it needs; see `MEASURES`.
      measurements: those that no other study needs, by these names: the records and the
        function that makes groups of them from a context and the keys it has.
      example_parts: the parts of the examples along which it needs drafts.
      prepare: computes the data of the parts from a run; the run itself by default.
      tables, charts, lattices, findings: functions of the prepared data. Every number
        in them comes from the run's records or from the paper.
      notes: sentences, or functions that return them.
    """

    name: str
    title: str
    paper: str
    question: str
    measures: tuple[str, ...] = (DRAFTS,)
    measurements: Mapping[str, tuple[type[Record], Measurement]] = dataclasses.field(
        default_factory=dict
    )
    example_parts: tuple[str, ...] = (REPORT,)
    prepare: Callable[[StudyRun], Any] = lambda run: run
    tables: Sequence[Part] = ()
    charts: Sequence[Part] = ()
    lattices: Sequence[Part] = ()
    findings: Sequence[Part] = ()
    notes: Sequence[str | Part] = ()

    def exhibit(self, run: StudyRun) -> Exhibit:
        """Creates the exhibit of a run."""
        with readable(f"the results in {run.folder}", f"run {self.name} again"):
            data = self.prepare(run)

            def evaluate(parts: Iterable[str | Part]) -> list[Any]:
                results = [part(data) if callable(part) else part for part in parts]
                return [
                    entry
                    for result in results
                    for entry in (result if isinstance(result, list) else [result])
                ]

            notes = evaluate(self.notes)
            if DRAFTING & {*self.measures}:
                notes += _weight_notes(run)
            temperature = run.facts.get("settings", {}).get("text_temperature")
            if temperature and {*self.measures} - self.measurements.keys():
                notes.append(
                    f"The texts are sampled at temperature {temperature:g}; a draft "
                    "token is accepted if it is the token of the text."
                )
            return Exhibit(
                self.name,
                self.title,
                self.paper,
                self.question,
                tables=evaluate(self.tables),
                charts=evaluate(self.charts),
                lattices=evaluate(self.lattices),
                findings=evaluate(self.findings),
                notes=[*notes, *run.facts.get("notes", [])],
                facts={**run.facts, "block_size": run.block_size},
            )


def _weight_notes(run: StudyRun) -> list[str]:
    """Notes on the weight α of the contenders that do not set it."""
    if tuned := run.facts.get("tuned"):
        return [_tuned_note(run, tuned)]
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
        weights = "α = 1, not tuned"
        if tuned:
            weights = "α tuned on examples that are not reported: " + ", ".join(
                f"{run.task_label(task)} {alpha:g}" for task, alpha in tuned.items()
            )
            zero = run.facts.get("zero_wins", {}).get(kind, [])
            if zero := [run.task_label(task) for task in zero if task in tuned]:
                weights += f"; α = 0 is better on {', '.join(zero)}"
        notes.append(f"{label} rescorers that do not set α use {weights}.")
    return notes


def _tuned_note(run: StudyRun, tuned: dict[str, Any]) -> str:
    """The settings that were tuned for each contender."""
    parts = []
    for name, by_task in tuned.items():
        words = {
            task: " ".join(f"{key} {value:g}" for key, value in values.items())
            for task, values in by_task.items()
        }
        if len({*words.values()}) == 1:
            text = next(iter(words.values()))
        else:
            text = ", ".join(f"{run.task_label(t)} {word}" for t, word in words.items())
        parts.append(f"{run.label(name)}: {text}")
    return (
        "Settings were tuned for each method, with its search and number of drafts, on "
        f"examples that are not reported. {'; '.join(parts)}."
    )
