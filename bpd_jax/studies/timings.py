"""Timings of contenders: sums, block efficiencies and speed-ups."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.evaluation.efficiency import gain_interval
from bpd_jax.reporting.exhibits import Cell
from bpd_jax.studies.measure_timing import plain_name, speculative_name
from bpd_jax.studies.refinements import unrefined
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study_records import TimingRecord
from bpd_jax.studies.tables import gain_cell, missing_cell, ratio_cell

Turn = tuple[str, int, int]
"""Task, example, round."""
Tasks = Collection[str] | None
"""Names of tasks; None for all."""


class TimedSums(NamedTuple):
    """Sums over the rounds of one contender, `[prompts]` each."""

    tokens: np.ndarray
    calls: np.ndarray
    milliseconds: np.ndarray


class Timings:
    """Timing records by contender, temperature, task, example and round."""

    def __init__(self, run: StudyRun) -> None:
        """Indexes the records of a run."""
        self.run = run
        self._records: dict[tuple[str, float], dict[Turn, TimingRecord]] = {}
        for record in run.of(TimingRecord):
            turns = self._records.setdefault((record.contender, record.temperature), {})
            turns[record.task, record.example, record.round] = record
        measured = {task for turns in self._records.values() for task, *_ in turns}
        known = [task for task in run.tasks if task in measured]
        self.tasks = [*known, *sorted(measured - set(known))]
        self.temperatures = sorted({temperature for _, temperature in self._records})
        self.drawn = any(name != plain_name(name) for name, _ in self._records)

    def contenders(self, temperature: float) -> list[str]:
        """Plain decoding, then the others in the order of the run.

        Each refined contender follows the one that it refines.
        """
        found = [name for name, at in self._records if at == temperature]
        labels = self.run.facts.get("labels", {})
        place = {name: number for number, name in enumerate([GREEDY.name, *labels])}
        found.sort(key=lambda name: place.get(plain_name(name), len(place)))
        bases = {name: base_of(name, found) for name in found}
        return [
            name
            for first in found
            if bases[first] is None
            for name in (first, *(n for n in found if bases[n] == first))
        ]

    def label(self, name: str) -> str:
        """The display name of a contender."""
        if name == GREEDY.name:
            return GREEDY.label()
        label = self.run.label(plain_name(name))
        drawn = name != plain_name(name)
        return f"{label}, speculative sampling" if drawn else label

    def prompts(self, task: str, temperature: float) -> int:
        """The number of prompts of a task that some contender decoded."""
        return len(
            {
                turn[:2]
                for (_, at), turns in self._records.items()
                for turn in turns
                if at == temperature and turn[0] == task
            }
        )

    def covers(
        self, name: str, other: str, temperature: float, tasks: Tasks = None
    ) -> bool:
        """Whether a contender was measured on every task that another was, of some."""
        mine, theirs = (
            {
                task
                for task, *_ in self._records.get((who, temperature), {})
                if tasks is None or task in tasks
            }
            for who in (name, other)
        )
        return bool(mine) and mine >= theirs

    def sums(
        self, names: Sequence[str], temperature: float, tasks: Tasks = None
    ) -> list[TimedSums] | None:
        """Sums over the prompts that all of some contenders decoded in a round.

        Args:
          names: of the contenders.
          temperature: of sampling.
          tasks: some of them; None for all.

        Returns:
          None if there is no such prompt.
        """
        turns = [self._records.get((name, temperature), {}) for name in names]
        shared = sorted(
            turn
            for turn in set.intersection(*(set(turn) for turn in turns))
            if tasks is None or turn[0] in tasks
        )
        if not shared:
            return None
        prompts = {turn[:2]: None for turn in shared}
        place = {prompt: number for number, prompt in enumerate(prompts)}
        found = []
        for records in turns:
            columns = np.zeros((3, len(place)))
            for turn in shared:
                record = records[turn]
                columns[:, place[turn[:2]]] += (
                    record.tokens,
                    record.calls,
                    1e3 * record.seconds,
                )
            found.append(TimedSums(*columns))
        return found

    def efficiency(self, name: str, temperature: float, tasks: Tasks) -> Cell:
        """Tokens per serial call, with the interval over prompts."""
        sums = self.sums([name], temperature, tasks)
        if sums is None or self._partial(name, GREEDY.name, temperature, tasks):
            return missing_cell()
        return ratio_cell((sums[0].tokens, sums[0].calls))

    def speed(
        self, name: str, base: str, temperature: float, tasks: Tasks = None
    ) -> Cell:
        """How many times as fast as another contender, in tokens per second."""
        sums = self.sums([name, base], temperature, tasks)
        if sums is None or self._partial(name, base, temperature, tasks):
            return missing_cell()
        mine, theirs = ((one.tokens, one.milliseconds) for one in sums)
        (value, other) = (
            float(tokens.sum()) / float(milliseconds.sum())
            for tokens, milliseconds in (mine, theirs)
        )
        if name == base or len(mine[0]) < 2:
            return Cell(value / other)
        low, high = gain_interval(*mine, *theirs)
        return Cell(value / other, interval=(1 + low, 1 + high))

    def gain(self, name: str, base: str, temperature: float) -> Cell:
        """Gain in block efficiency in percent, over all tasks."""
        sums = self.sums([name, base], temperature)
        if sums is None or not self.covers(name, base, temperature):
            return missing_cell()
        mine, theirs = ((one.tokens, one.calls) for one in sums)
        return gain_cell(mine, theirs)

    def _partial(self, name: str, other: str, temperature: float, tasks: Tasks) -> bool:
        """Whether a sum over several tasks lacks some of them."""
        several = tasks is None or len(tasks) != 1
        return several and not self.covers(name, other, temperature, tasks)


def base_of(name: str, others: Iterable[str]) -> str | None:
    """The contender that another refines, with the same kind of acceptance."""
    drawn = name != plain_name(name)
    alike = [plain_name(o) for o in others if (o != plain_name(o)) == drawn]
    base = unrefined(plain_name(name), alike)
    return speculative_name(base) if drawn and base is not None else base
