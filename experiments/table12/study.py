"""Tables 12 and 13: latency of the search for the best drafts under an n-gram model."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from bpd_jax.reporting.exhibits import (
    LINES,
    Cell,
    Chart,
    Column,
    Finding,
    Table,
    line_of,
)
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import LATENCY, Study
from bpd_jax.studies.study_records import LatencyRecord
from bpd_jax.studies.tables import by_row, judged, missing_cell, table
from experiments import printed
from experiments.table12.latency import (
    DEVICE,
    FST,
    PATHS_STEPS,
    PATHS_WIDTH,
    VITERBI,
    of_study,
)

LABELS = {
    FST: "OpenFst (the paper’s engine)",
    VITERBI: "Dynamic programming on the host",
    DEVICE: "Inside the compiled loop",
}
"""Display names of engines, in the order of the tables."""

# Largest accepted ratio; in the paper 16 paths take 1.22 times as long as one.
_MOST_GROWTH = 1.5

# The same for 16 candidates in place of 2; in the paper 1.2 to 2.0 times.
_MOST_WIDER = 2.0

Shape = tuple[int, int, int]
"""Numbers of steps, candidates and paths of a search."""

_PATHS = {(PATHS_STEPS, PATHS_WIDTH, n): time for n, time in printed.TABLE12.items()}
"""Table 12: the paper's milliseconds by shape."""

_WIDTHS = {
    steps: {(steps, k, 1): time for k, time in row.items()}
    for steps, row in printed.TABLE13.items()
}
"""Table 13: the same for each row, by number of steps."""

_TITLE = f"Latency of p-best search, {PATHS_STEPS} steps of {PATHS_WIDTH} arcs"

Times = dict[Shape, Cell]
"""Milliseconds of one engine by shape: medians over the runs, with their range."""


def _prepare(run: StudyRun) -> dict[str, Times]:
    """The times of every engine."""
    engines: dict[str, Times] = {}
    for record in run.of(LatencyRecord):
        times, shape = record.milliseconds, (record.steps, record.width, record.paths)
        value = Cell(float(np.median(times)), None, (min(times), max(times)))
        engines.setdefault(record.engine, {})[shape] = value
    return {engine: engines[engine] for engine in LABELS if engine in engines}


def _cells(engine: str, times: Times, shapes: Mapping[Shape, float]) -> list[Cell]:
    """The times of some shapes, and the ratio of the last to the first.

    Only cells of the paper's engine have the paper's values.
    """
    cells = [
        dataclasses.replace(
            times.get(shape, missing_cell()), paper=paper if engine == FST else None
        )
        for shape, paper in shapes.items()
    ]
    first, last = cells[0], cells[-1]
    paper = last.paper / first.paper if last.paper and first.paper else None
    if last.value is None or not first.value:
        return [*cells, missing_cell(paper)]
    return [*cells, Cell(last.value / first.value, paper)]


def _table(
    name: str,
    title: str,
    heading: str,
    columns: list[str],
    rows: dict[tuple[str, int], str],
    engines: dict[str, Times],
) -> Table:
    """A table with a row per engine, or per engine and number of steps."""
    growth = Column(f"{columns[-1]} over {columns[0]}", unit="×")

    def cells(key: tuple[str, int]) -> list[Cell]:
        engine, steps = key
        return _cells(engine, engines.get(engine, {}), _WIDTHS.get(steps, _PATHS))

    return table(
        name,
        title,
        heading,
        rows,
        by_row([*(Column(c, "Milliseconds", 3) for c in columns), growth], cells),
        "Medians over the runs, with the fastest and the slowest run.",
        intervals="range of runs",
    )


def _paths_table(engines: dict[str, Times]) -> Table:
    """Table 12: latency by number of paths."""
    rows = {(engine, 0): LABELS[engine] for engine in engines or [FST]}
    columns = [f"N = {paths}" for paths in printed.TABLE12]
    return _table("table12", _TITLE, "Engine", columns, rows, engines)


def _shapes_table(engines: dict[str, Times]) -> Table:
    """Table 13: latency of the best path by number of steps and of candidates."""
    rows = {
        (engine, steps): f"{LABELS[engine]}, {steps} steps"
        for engine in engines or [FST]
        for steps in _WIDTHS
    }
    columns = [f"k = {k}" for k in printed.TABLE13[PATHS_STEPS]]
    title = "Latency of the best path, by number of steps and of candidates k"
    return _table("table13", title, "Engine and steps", columns, rows, engines)


def _chart(engines: dict[str, Times]) -> Chart:
    """Table 12 as lines."""
    lines = [
        line_of(
            LABELS[engine],
            {shape[2]: times.get(shape, missing_cell()) for shape in _PATHS},
        )
        for engine, times in engines.items()
    ]
    series = [line_of("Paper", printed.TABLE12, dashed=True), *lines]
    return Chart(
        "table12", _TITLE, LINES, "paths N", "milliseconds", series, logarithmic=True
    )


def _paths_finding(engine: str, times: Times) -> Finding:
    most = max(printed.TABLE12)
    statement = (
        f"{LABELS[engine]}: latency depends little on the number of paths ({most} "
        f"paths take at most {_MOST_GROWTH:g} times as long as one)."
    )
    one, *_, several, growth = _cells(engine, times, _PATHS)
    if growth.value is None:
        return judged(statement, "Not measured.")
    return Finding(
        statement,
        growth.value <= _MOST_GROWTH,
        f"{most} paths take {growth.value:.2f} times as long as one "
        f"({one.value:.3f} and {several.value:.3f} ms; paper: "
        f"{printed.TABLE12[most] / printed.TABLE12[1]:.2f} times).",
    )


def _width_finding(engine: str, times: Times) -> Finding:
    few, *_, many = printed.TABLE13[PATHS_STEPS]
    statement = (
        f"{LABELS[engine]}: latency depends little on the number of candidates (at "
        f"most {_MOST_WIDER:g} times for k = {many} instead of {few}, as in the paper)."
    )
    growths = {
        steps: value
        for steps, shapes in _WIDTHS.items()
        if (value := _cells(engine, times, shapes)[-1].value) is not None
    }
    if not growths:
        return judged(statement, "Not measured.")
    listed = ", ".join(
        f"{growth:.2f} times at {steps} steps (paper: "
        f"{printed.TABLE13[steps][many] / printed.TABLE13[steps][few]:.2f})"
        for steps, growth in growths.items()
    )
    return Finding(statement, max(growths.values()) <= _MOST_WIDER, f"{listed}.")


STUDY = Study(
    "table12",
    "Latency of rescoring",
    "Tables 12 and 13",
    "What is the latency of the search for the best drafts of a lattice, by number of "
    "drafts, of steps and of candidates?",
    measures=(LATENCY,),
    measurements={LATENCY: (LatencyRecord, of_study)},
    prepare=_prepare,
    tables=[_paths_table, _shapes_table],
    charts=[_chart],
    findings=[
        lambda engines: [
            judge(engine, times)
            for engine, times in engines.items()
            for judge in (_paths_finding, _width_finding)
        ]
    ],
    notes=[
        "A step is a position with several candidates. The certain token before them "
        "is not a step, so 8 steps of 16 arcs have 16⁸ paths.",
        "The paper does not specify its processor. Our lattices are generated from the "
        "n-gram model’s tokens, so that most neighbours are bigrams of the model, and "
        "every lattice is new to the search.",
        "OpenFst searches for twice as many paths as drafts, because one draft has a "
        "path for every way to back off. This adds to the cost of more drafts.",
    ],
)
