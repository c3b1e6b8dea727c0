"""Sums, block efficiencies and speed-ups of timed contenders."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.evaluation.efficiency import gain_interval
from bpd_jax.reporting.exhibits import Cell
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study_records import TimingRecord
from bpd_jax.studies.tables import gain_cell, missing_cell, ratio_cell
from experiments.refinements import unrefined
from experiments.table_e.measurement import variant_of, with_variant

_LABELS = {
    "speculative": "speculative sampling",
    "batched": "batched verification",
}

Turn = tuple[str, int, int]
"""Task, example, round."""
Tasks = Collection[str] | None
"""Names of tasks; None for all."""


class TimedSums(NamedTuple):
    """Sums over the rounds of one contender, for each prompt, `[n]` each."""

    tokens: np.ndarray
    calls: np.ndarray
    milliseconds: np.ndarray


class Timings:
    """The timing records of a run by contender, temperature, task, example and round.

    Attributes:
      tasks: measured tasks, in the order of the run.
      temperatures: measured temperatures, in ascending order.
      has_speculative: whether speculative sampling was measured.
    """

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
        self.has_speculative = any(
            variant_of(name)[1] == "speculative" for name, _ in self._records
        )

    def contenders(self, temperature: float) -> list[str]:
        """The names of plain decoding, then of the others in the order of the run.

        Each refined contender follows the one that it refines.
        """
        names = [name for name, at in self._records if at == temperature]
        order = [GREEDY.name, *self.run.facts.get("labels", {})]
        index = {name: number for number, name in enumerate(order)}
        names.sort(key=lambda name: index.get(variant_of(name)[0], len(index)))
        bases = {name: base_of(name, names) for name in names}
        return [
            name
            for first in names
            if bases[first] is None
            for name in (first, *(n for n in names if bases[n] == first))
        ]

    def label(self, name: str) -> str:
        """The display name of a contender."""
        if name == GREEDY.name:
            return GREEDY.label()
        contender, variant = variant_of(name)
        label = self.run.label(contender)
        return label if variant is None else f"{label}, {_LABELS[variant]}"

    def prompts(self, task: str, temperature: float) -> int:
        """The number of prompts of a task that any contender decoded."""
        return len(
            {
                turn[:2]
                for (_, at), turns in self._records.items()
                for turn in turns
                if at == temperature and turn[0] == task
            }
        )

    def sums(
        self, names: Sequence[str], temperature: float, tasks: Tasks = None
    ) -> list[TimedSums] | None:
        """Sums over the rounds and prompts that all of the contenders decoded.

        Args:
          names: names of the contenders.
          temperature: temperature of sampling.
          tasks: the tasks to consider; None for all.

        Returns:
          One entry per contender; None if there is no such prompt.
        """
        turns = [self._records.get((name, temperature), {}) for name in names]
        shared = sorted(
            turn
            for turn in set.intersection(*(set(turn) for turn in turns))
            if tasks is None or turn[0] in tasks
        )
        if not shared:
            return None
        prompts = dict.fromkeys(turn[:2] for turn in shared)
        index = {prompt: number for number, prompt in enumerate(prompts)}
        sums = []
        for records in turns:
            columns = np.zeros((3, len(index)))
            for turn in shared:
                record = records[turn]
                columns[:, index[turn[:2]]] += (
                    record.tokens,
                    record.calls,
                    1e3 * record.seconds,
                )
            sums.append(TimedSums(*columns))
        return sums

    def efficiency(self, name: str, temperature: float, tasks: Tasks) -> Cell:
        """Tokens per serial call, with the interval over prompts."""
        sums = self.sums([name], temperature, tasks)
        if sums is None or self._partial(name, GREEDY.name, temperature, tasks):
            return missing_cell()
        return ratio_cell((sums[0].tokens, sums[0].calls))

    def speed(
        self, name: str, base: str, temperature: float, tasks: Tasks = None
    ) -> Cell:
        """Speed-up over another contender, a ratio of tokens per second."""
        sums = self.sums([name, base], temperature, tasks)
        if sums is None or self._partial(name, base, temperature, tasks):
            return missing_cell()
        rate, base_rate = (
            float(each.tokens.sum()) / float(each.milliseconds.sum()) for each in sums
        )
        if name == base or len(sums[0].tokens) < 2:
            return Cell(rate / base_rate)
        pairs = ((each.tokens, each.milliseconds) for each in sums)
        low, high = gain_interval(*itertools.chain(*pairs))
        return Cell(rate / base_rate, interval=(1 + low, 1 + high))

    def gain(self, name: str, base: str, temperature: float) -> Cell:
        """Gain in block efficiency in percent, over all tasks."""
        sums = self.sums([name, base], temperature)
        if sums is None or self._partial(name, base, temperature):
            return missing_cell()
        refined, unrefined = ((each.tokens, each.calls) for each in sums)
        return gain_cell(refined, unrefined)

    def _partial(
        self, name: str, other: str, temperature: float, tasks: Tasks = None
    ) -> bool:
        """Whether a sum over several tasks lacks one that another has measured."""
        if tasks is not None and len(tasks) == 1:
            return False
        measured, required = (
            {
                task
                for task, *_ in self._records.get((contender, temperature), {})
                if tasks is None or task in tasks
            }
            for contender in (name, other)
        )
        return not measured or not measured >= required


def base_of(name: str, others: Iterable[str]) -> str | None:
    """The contender that another one refines, with the same kind of acceptance."""
    contender, variant = variant_of(name)
    candidates = [o for o, other in map(variant_of, others) if other == variant]
    base = unrefined(contender, candidates)
    return None if base is None else with_variant(base, variant)
