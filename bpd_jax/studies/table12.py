"""Tables 12 and 13: how long an n-gram model takes to find the best drafts."""

from collections.abc import Iterable, Sequence

import numpy as np

from bpd_jax.reporting.exhibits import (
    LINES,
    Cell,
    Chart,
    Column,
    Exhibit,
    Finding,
    Row,
    Table,
)
from bpd_jax.studies import printed
from bpd_jax.studies.measure_latency import (
    DEVICE,
    FST,
    FST_EXACT,
    PATHS_STEPS,
    PATHS_WIDTH,
    VITERBI,
)
from bpd_jax.studies.records import LatencyRecord
from bpd_jax.studies.results import line_of, missing_cell
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import LATENCY, Study

LABELS = {
    FST: "OpenFst (the paper’s engine)",
    FST_EXACT: "OpenFst, exact back-off",
    VITERBI: "Dynamic programming on the host",
    DEVICE: "Inside the compiled loop",
}
"""What people read in place of engines, in the order of the tables."""

# What "hardly" is taken to mean; the paper's own 16 paths take 1.22 times as long as 1.
_HARDLY = 1.5

_ALL_PATHS = tuple(printed.TABLE12)
_ALL_STEPS = tuple(printed.TABLE13)
_ALL_WIDTHS = tuple(printed.TABLE13[_ALL_STEPS[0]])

NOTES = [
    "A step is a position where candidates are chosen among: the certain token "
    "in front of them is none, so that 8 steps of 16 arcs hold 16⁸ paths.",
    "The paper does not name its processor. Lattices here are made up over the "
    "n-gram model’s own tokens, so that most neighbours are bigrams of the "
    "model, and every one is new to the search.",
    "OpenFst is asked for twice as many paths as drafts, because one draft has "
    "a path for every way to back off: part of what more drafts cost here.",
]
_CAPTION = "Medians over the runs, with the fastest and the slowest."
_RANGE = "range of runs"

Times = dict[tuple[int, int, int], LatencyRecord]
"""The cells of one engine, by steps, width and paths."""


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws both tables; medians over the runs of a cell, with their range."""
    engines: dict[str, Times] = {}
    for record in run.of(LatencyRecord):
        cell = (record.steps, record.width, record.paths)
        engines.setdefault(record.engine, {})[cell] = record
    known = [engine for engine in LABELS if engine in engines]
    ordered = {
        engine: engines[engine] for engine in known or [FST] if engine in engines
    }
    return study.show(
        run,
        tables=[_paths_table(ordered), _shapes_table(ordered)],
        charts=[_paths_chart(ordered)],
        findings=[
            finding
            for engine, times in ordered.items()
            for finding in (
                _paths_finding(engine, times),
                _width_finding(engine, times),
            )
        ],
        notes=NOTES,
    )


def _paths_table(engines: dict[str, Times]) -> Table:
    """Table 12: by the number of paths, and what the most cost over one."""
    shapes = [(PATHS_STEPS, PATHS_WIDTH, paths) for paths in _ALL_PATHS]
    return Table(
        "table12",
        f"Latency of p-best search, {PATHS_STEPS} steps of {PATHS_WIDTH} arcs",
        "Engine",
        _columns([f"N = {paths}" for paths in _ALL_PATHS]),
        [
            _row(LABELS[engine], engine, times, shapes, printed.TABLE12.values())
            for engine, times in (engines or {FST: {}}).items()
        ],
        _CAPTION,
        _RANGE,
    )


def _shapes_table(engines: dict[str, Times]) -> Table:
    """Table 13: the best path, by steps and candidates."""
    return Table(
        "table13",
        "Latency of the best path, by steps and candidates k",
        "Engine and steps",
        _columns([f"k = {k}" for k in _ALL_WIDTHS]),
        [
            _row(
                f"{LABELS[engine]}, {steps} steps",
                engine,
                times,
                [(steps, k, 1) for k in _ALL_WIDTHS],
                paper.values(),
            )
            for engine, times in (engines or {FST: {}}).items()
            for steps, paper in printed.TABLE13.items()
        ],
        _CAPTION,
        _RANGE,
    )


def _columns(labels: Sequence[str]) -> list[Column]:
    """Milliseconds, then the growth from the first column to the last."""
    growth = Column(f"{labels[-1]} over {labels[0]}", unit="×")
    return [*(Column(label, "Milliseconds", 3) for label in labels), growth]


def _row(
    label: str,
    engine: str,
    times: Times,
    shapes: Sequence[tuple[int, int, int]],
    paper: Iterable[float],
) -> Row:
    """The paper's numbers stand beside its own engine."""
    printed_times = list(paper) if engine == FST else [None] * len(shapes)
    cells = [
        _cell(times.get(shape), beside)
        for shape, beside in zip(shapes, printed_times, strict=True)
    ]
    return Row(label, [*cells, _growth(cells)])


def _cell(record: LatencyRecord | None, paper: float | None) -> Cell:
    if record is None:
        return missing_cell(paper)
    times = record.milliseconds
    return Cell(float(np.median(times)), paper, (min(times), max(times)))


def _growth(cells: Sequence[Cell]) -> Cell:
    """The last of some cells over the first."""
    first, last = cells[0], cells[-1]
    paper = last.paper / first.paper if last.paper and first.paper else None
    if last.value is None or not first.value:
        return missing_cell(paper)
    return Cell(last.value / first.value, paper)


def _paths_chart(engines: dict[str, Times]) -> Chart:
    """Table 12 as lines."""
    paper = line_of("Paper", printed.TABLE12, dashed=True)
    lines = [
        line_of(
            LABELS[engine],
            {
                paths: _cell(times.get((PATHS_STEPS, PATHS_WIDTH, paths)), None)
                for paths in _ALL_PATHS
            },
        )
        for engine, times in engines.items()
    ]
    title = f"Latency of p-best search, {PATHS_STEPS} steps of {PATHS_WIDTH} arcs"
    series = [paper, *lines]
    return Chart(
        "table12", title, LINES, "paths N", "milliseconds", series, logarithmic=True
    )


def _paths_finding(engine: str, times: Times) -> Finding:
    cells = [
        _cell(times.get((PATHS_STEPS, PATHS_WIDTH, paths)), None)
        for paths in (_ALL_PATHS[0], _ALL_PATHS[-1])
    ]
    growth = _growth(cells).value
    statement = (
        f"{LABELS[engine]}: latency hardly depends on the number of paths (at most "
        f"{_HARDLY:g} times for {_ALL_PATHS[-1]} instead of one)."
    )
    if growth is None:
        return Finding(statement, None, "Not measured.")
    return Finding(
        statement,
        growth <= _HARDLY,
        f"{_ALL_PATHS[-1]} paths take {growth:.2f} times as long as one "
        f"({cells[0].value:.3f} and {cells[1].value:.3f} ms; the paper "
        f"{printed.TABLE12[_ALL_PATHS[-1]] / printed.TABLE12[1]:.2f} times).",
    )


def _width_finding(engine: str, times: Times) -> Finding:
    few, many = _ALL_WIDTHS[0], _ALL_WIDTHS[-1]
    growths = {}
    for steps in _ALL_STEPS:
        cells = [_cell(times.get((steps, k, 1)), None) for k in (few, many)]
        growth = _growth(cells).value
        if growth is not None:
            growths[steps] = growth
    proportion = many / few
    statement = (
        f"{LABELS[engine]}: latency grows mildly with the candidates (less than in "
        f"proportion: {proportion:g} times for k = {many} instead of {few})."
    )
    if not growths:
        return Finding(statement, None, "Not measured.")
    found = ", ".join(
        f"{growth:.2f} times at {steps} steps (the paper "
        f"{printed.TABLE13[steps][many] / printed.TABLE13[steps][few]:.2f})"
        for steps, growth in growths.items()
    )
    return Finding(statement, max(growths.values()) < proportion, f"{found}.")


STUDY = Study(
    name="table12",
    title="Latency of rescoring",
    paper="Tables 12 and 13",
    question=(
        "How long does an n-gram model take to find the best drafts of a lattice, by "
        "the number of drafts, of steps and of candidates?"
    ),
    present=present,
    measures=(LATENCY,),
)
