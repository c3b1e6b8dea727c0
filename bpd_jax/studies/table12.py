"""Tables 12 and 13: how long an n-gram model takes to find the best drafts."""

from collections.abc import Sequence

import numpy as np

from bpd_jax.reporting.exhibits import (
    Cell,
    Chart,
    Column,
    Exhibit,
    Finding,
    Row,
    Series,
    Table,
)
from bpd_jax.studies import printed
from bpd_jax.studies.measure_latency import (
    DEVICE,
    FST,
    PATHS_STEPS,
    PATHS_WIDTH,
    VITERBI,
)
from bpd_jax.studies.records import LatencyRecord
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import LATENCY, Study

LABELS = {
    FST: "OpenFst (the paper’s engine)",
    VITERBI: "Dynamic programming on the host",
    DEVICE: "Inside the compiled loop",
}
"""What people read in place of engines, in the order of the tables."""

# What "hardly" is taken to mean; the paper's own 16 paths take 1.22 times as long as 1.
_HARDLY = 1.5

_ALL_PATHS = tuple(printed.TABLE12)
_ALL_STEPS = tuple(printed.TABLE13)
_ALL_WIDTHS = tuple(printed.TABLE13[_ALL_STEPS[0]])

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
    return Exhibit(
        name=study.name,
        title=study.title,
        paper=study.paper,
        question=study.question,
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
        notes=[
            "A step is a position where candidates are chosen among: the certain token "
            "in front of them is none, so that 8 steps of 16 arcs hold 16⁸ paths.",
            "The paper does not name its processor. Lattices here are made up over the "
            "n-gram model’s own tokens, so that most neighbours are bigrams of the "
            "model, and every one is new to the search.",
            "OpenFst is asked for twice as many paths as drafts, because one draft has "
            "a path for every way to back off: part of what more drafts cost here.",
        ],
        facts=run.facts,
    )


def _paths_table(engines: dict[str, Times]) -> Table:
    """Table 12: by the number of paths, and what the most cost over one."""
    rows = []
    for engine in engines or {FST: {}}:
        times = engines.get(engine, {})
        paper = printed.TABLE12 if engine == FST else {}
        cells = [
            _cell(times.get((PATHS_STEPS, PATHS_WIDTH, paths)), paper.get(paths))
            for paths in _ALL_PATHS
        ]
        rows.append(Row(LABELS[engine], [*cells, _growth(cells)]))
    return Table(
        name="table12",
        title=f"Latency of p-best search, {PATHS_STEPS} steps of {PATHS_WIDTH} arcs",
        heading="Engine",
        columns=[
            *(Column(f"N = {paths}", "Milliseconds", digits=3) for paths in _ALL_PATHS),
            Column(f"N = {_ALL_PATHS[-1]} over N = 1", digits=2, unit="×"),
        ],
        rows=rows,
        caption="Medians over the runs, with the fastest and the slowest.",
        intervals="range of runs",
    )


def _shapes_table(engines: dict[str, Times]) -> Table:
    """Table 13: the best path, by steps and candidates."""
    rows = []
    for engine in engines or {FST: {}}:
        times = engines.get(engine, {})
        for steps in _ALL_STEPS:
            paper = printed.TABLE13[steps] if engine == FST else {}
            cells = [_cell(times.get((steps, k, 1)), paper.get(k)) for k in _ALL_WIDTHS]
            label = f"{LABELS[engine]}, {steps} steps"
            rows.append(Row(label, [*cells, _growth(cells)]))
    return Table(
        name="table13",
        title="Latency of the best path, by steps and candidates k",
        heading="Engine and steps",
        columns=[
            *(Column(f"k = {k}", "Milliseconds", digits=3) for k in _ALL_WIDTHS),
            Column(f"k = {_ALL_WIDTHS[-1]} over k = {_ALL_WIDTHS[0]}", unit="×"),
        ],
        rows=rows,
        caption="Medians over the runs, with the fastest and the slowest.",
        intervals="range of runs",
    )


def _cell(record: LatencyRecord | None, paper: float | None) -> Cell:
    if record is None:
        return Cell(paper=paper, text="not measured")
    times = record.milliseconds
    return Cell(float(np.median(times)), paper, (min(times), max(times)))


def _growth(cells: Sequence[Cell]) -> Cell:
    """The last of some cells over the first."""
    first, last = cells[0], cells[-1]
    paper = last.paper / first.paper if last.paper and first.paper else None
    if last.value is None or not first.value:
        return Cell(paper=paper, text="not measured")
    return Cell(last.value / first.value, paper)


def _paths_chart(engines: dict[str, Times]) -> Chart:
    """Table 12 as lines."""
    series = [
        Series(
            "Paper",
            [float(paths) for paths in printed.TABLE12],
            list(printed.TABLE12.values()),
            dashed=True,
        )
    ]
    for engine, times in engines.items():
        found = {
            paths: _cell(times[(PATHS_STEPS, PATHS_WIDTH, paths)], None)
            for paths in _ALL_PATHS
            if (PATHS_STEPS, PATHS_WIDTH, paths) in times
        }
        series.append(
            Series(
                LABELS[engine],
                [float(paths) for paths in found],
                [cell.value or 0.0 for cell in found.values()],
                [cell.interval[0] for cell in found.values() if cell.interval],
                [cell.interval[1] for cell in found.values() if cell.interval],
            )
        )
    return Chart(
        name="table12",
        title=f"Latency of p-best search, {PATHS_STEPS} steps of {PATHS_WIDTH} arcs",
        kind="lines",
        x_label="paths N",
        y_label="milliseconds",
        series=series,
        logarithmic=True,
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
