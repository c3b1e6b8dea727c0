"""The records of a run by contender, task and example.

Contenders are compared on the examples that all of them were recorded on, so that the
comparison is fair even for an interrupted run.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from bpd_jax.reporting.exhibits import Cell
from bpd_jax.reporting.records import Facts
from bpd_jax.studies.study_config import BPD, parse_contender
from bpd_jax.studies.study_records import (
    REPORT,
    DraftRecord,
    Record,
    from_digits,
)
from bpd_jax.studies.tables import ALL, Sums, gain_cell, ratio_cell
from bpd_jax.studies.tasks import PAPER_TASKS

T = TypeVar("T", bound=Record)

Numbers = dict[str, dict[str, float]]
"""A table that the paper prints: task or method → column → number."""


@dataclasses.dataclass(frozen=True)
class ContenderDrafts:
    """The records of one contender's drafts on some examples."""

    records: list[DraftRecord]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[DraftRecord]:
        return iter(self.records)

    @functools.cached_property
    def sums(self) -> Sums:
        """Tokens and serial calls of every example."""
        tokens = np.array([record.tokens for record in self], int)
        return tokens, np.array([record.calls for record in self], int)

    @property
    def efficiency(self) -> float | None:
        """Block efficiency over the examples; None without examples."""
        tokens, calls = self.sums
        return float(tokens.sum()) / float(calls.sum()) if len(self) else None

    @property
    def checked(self) -> float:
        """Mean number of draft tokens that a serial call verifies."""
        return sum(record.nodes for record in self) / int(self.sums[1].sum())

    @property
    def repetition(self) -> tuple[float | None, float | None]:
        """Share of equal neighbours and mean longest run in the best-ranked drafts.

        Over all positions of the texts, as in Table 5 and Figure 3, so that all methods
        draft at the same positions; for drafts of two tokens or more (paper section
        6.1). `bpd_jax.evaluation.draft_statistics.repetition` is over the calls that
        one method makes.
        """
        sums = np.array([record.repetition for record in self], int).reshape(-1, 4)
        equal, pairs, longest, drafts = sums.sum(axis=0).tolist()
        return (equal / pairs, longest / drafts) if pairs else (None, None)

    def cell(self, paper: float | None = None) -> Cell:
        """Block efficiency with its bootstrap interval over examples."""
        return ratio_cell(self.sums, paper)

    def gain(self, base: "ContenderDrafts", paper: float | None = None) -> Cell:
        """Gain in block efficiency, in percent, over drafts of the same examples."""
        return gain_cell(self.sums, base.sums, paper)


@dataclasses.dataclass(frozen=True)
class StudyRun:
    """The results of a study, as stored in a folder.

    Attributes:
      study: name of the study, such as `table4`.
      facts: command, date, device, versions, model, gin text, settings; `labels` maps
        contenders to their display names, `tasks` maps tasks to theirs.
      records: all records.
    """

    folder: pathlib.Path
    study: str
    facts: Facts
    records: list[Record]

    def of(self, kind: type[T]) -> list[T]:
        """The records of one kind."""
        return [record for record in self.records if isinstance(record, kind)]

    def label(self, contender: str) -> str:
        """The display name of a contender."""
        return str(self.facts.get("labels", {}).get(contender, contender))

    def task_label(self, task: str | None, everything: str = "all") -> str:
        """The display name of a task, or of `ALL` of them."""
        if task is ALL:
            return everything
        return str(self.facts.get("tasks", {}).get(task, task))

    @property
    def tasks(self) -> list[str]:
        """The tasks, in the order of the configuration."""
        return list(self.facts.get("tasks", {}))

    def rows(self, everything: str = "All") -> dict[str | None, str]:
        """The rows of a table: the tasks, then `ALL` of them, with their labels."""
        return {task: self.task_label(task, everything) for task in [*self.tasks, ALL]}

    @functools.cached_property
    def _by_contender(self) -> dict[str, list[DraftRecord]]:
        """The records of drafts, in the order of tasks and examples."""
        order = {name: index for index, name in enumerate(self.tasks)}
        by_contender: dict[str, list[DraftRecord]] = {}
        for record in sorted(
            self.of(DraftRecord),
            key=lambda r: (order.get(r.task, len(order)), r.example),
        ):
            by_contender.setdefault(record.contender, []).append(record)
        return by_contender

    @property
    def contenders(self) -> list[str]:
        """The contenders with records of drafts, in the order of the configuration."""
        recorded = dict.fromkeys(record.contender for record in self.of(DraftRecord))
        named = [name for name in self.facts.get("labels", {}) if name in recorded]
        return list(dict.fromkeys([*named, *recorded]))

    @property
    def oracle(self) -> str | None:
        """The recorded oracle that bounds all others: the widest one with all heads.

        An oracle without an explicit width has that of the lattice, which is the
        largest.
        """
        oracles = [
            contender
            for contender in map(parse_contender, self.contenders)
            if contender.method.is_oracle and contender.method.setting("heads") is None
        ]
        widest = max(
            oracles, key=lambda c: c.method.setting("k") or float("inf"), default=None
        )
        return None if widest is None else widest.name

    def drafts(
        self, contender: str, task: str | None = ALL, part: str = REPORT
    ) -> ContenderDrafts:
        """The drafts of one contender, in the order of tasks and examples.

        Args:
          contender: name of the contender.
          task: one task, or `ALL`.
          part: `TUNE` or `REPORT`.
        """
        return ContenderDrafts(
            [
                record
                for record in self._by_contender.get(contender, [])
                if record.part == part and task in (ALL, record.task)
            ]
        )

    def paired(
        self, contenders: Sequence[str], task: str | None = ALL, part: str = REPORT
    ) -> list[ContenderDrafts]:
        """The drafts of contenders on the examples that all of them were recorded on.

        Returns:
          One entry per contender, all with the same examples in the same order.
        """
        drafts = [self.drafts(name, task, part) for name in contenders]
        keys = [{(r.task, r.example) for r in records} for records in drafts]
        common = set.intersection(*keys) if keys else set()
        return [
            ContenderDrafts(
                [record for record in one if (record.task, record.example) in common]
            )
            for one in drafts
        ]

    @functools.cached_property
    def block_size(self) -> int | None:
        """L, tokens of the drafts of BPD; None without records of them."""
        lengths = [from_digits(record.length) for record in self.drafts(BPD)]
        return max((int(each.max()) for each in lengths), default=None)

    def by_task(
        self,
        *contenders: str,
        of: Callable[[ContenderDrafts], float | None] = lambda drafts: (
            drafts.efficiency
        ),
    ) -> list[dict[str, float]]:
        """A value by task, on the examples that all contenders share.

        Returns:
          One entry per contender, by default with the block efficiency.
        """
        paired = {task: self.paired(contenders, task) for task in self.tasks}
        return [
            {
                task: value
                for task, drafts in paired.items()
                if (value := of(drafts[index])) is not None
            }
            for index in range(len(contenders))
        ]

    def printed(
        self, numbers: Numbers, contender: str, task: str | None
    ) -> float | None:
        """The paper's value for a task and a contender, if it prints one.

        For `ALL` it is the mean over the paper's seven tasks, if all of them were run.
        """
        column = self.facts.get("printed", {}).get(contender)
        if task is not ALL:
            return numbers.get(task, {}).get(column)
        by_task = [numbers.get(name, {}).get(column) for name in self.tasks]
        values = [value for value in by_task if value is not None]
        return sum(values) / len(values) if len(values) == len(PAPER_TASKS) else None
