"""The report of one evaluation: its exhibits and key figures."""

import math
import re
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from bpd_jax.reporting import explorer
from bpd_jax.reporting.exhibits import (
    BARS,
    LINES,
    Cell,
    Chart,
    Column,
    Exhibit,
    Row,
    Series,
    Table,
    line_of,
)
from bpd_jax.reporting.formatting import MISSING, fact, percent
from bpd_jax.reporting.glossary import DEFINITIONS
from bpd_jax.reporting.page import KeyFigure, Page, PagePart
from bpd_jax.reporting.records import EvaluationReport, MethodSummary
from bpd_jax.reporting.terminal import standard_output
from bpd_jax.reporting.terminal_tables import print_exhibit

# Maximum number of points of a line, each the mean of neighbouring points.
_POINTS = 200
_LOSS = re.compile(r"(validation_)?loss(?:_head_(\d+))?")
# Charts of the losses, with their titles.
_LOSSES = {
    "loss_heads_training": "Loss of each head",
    "loss_heads_validation": "Loss of each head on validation data",
    "loss": "Total loss of all heads",
}
_TONES = {"identical": "good", "near-tie": "warn", "different": "bad"}


def page_of(report: EvaluationReport) -> Page:
    """The page of an evaluation; parts without content are left out."""
    parts = [PagePart("methods", methods_exhibit(report))]
    if report.lattice is not None:
        parts.append(
            PagePart(
                "lattice",
                Exhibit(
                    "lattice",
                    "The lattice of one block",
                    "",
                    "The candidates of every head for one block, most probable first; "
                    "darker candidates are more probable. The grey band marks the "
                    "tokens that greedy decoding emits. Each path is one method’s "
                    "draft: its accepted part is solid and ends with the method’s "
                    "letter, its rejected part is dotted.",
                    lattices=[report.lattice],
                ),
            )
        )
    if charts := loss_charts(report.curves):
        parts.append(
            PagePart(
                "training",
                Exhibit(
                    "training",
                    "Training",
                    "",
                    "Cross-entropy in nats per token. Head 1 is the language model, "
                    "head j predicts j tokens ahead.",
                    charts=charts,
                ),
            )
        )
    return Page(
        report.title,
        report.created,
        parts,
        key_figures(report),
        explorer.texts_of(report),
        meta=" · ".join(filter(None, [report.task, report.device, report.created])),
        terms=DEFINITIONS,
    )


def print_table(report: EvaluationReport, console: Console | None = None) -> None:
    """Prints model, task and device, the tables, and the key figures."""
    console = console or standard_output()
    console.print(Text(report.title, style="bold"))
    header = {"model": report.model, "task": report.task, "device": report.device}
    for name, value in header.items():
        if value:
            console.print(Text.assemble((f"{name:<7}", "dim"), fact(value)))
    print_exhibit(methods_exhibit(report), console, intervals=True)
    for figure in key_figures(report):
        line = Text.assemble((f"{figure.name:<20}", "dim"), (figure.value, "bold"))
        console.print(line.append(f"  {figure.note}", style="dim"))


def methods_exhibit(report: EvaluationReport) -> Exhibit:
    """Tables and charts of all methods and of their drafts."""
    tables = [_methods_table(report)] if report.methods else []
    charts = []
    if differing := [m for m in report.methods if m.divergence is not None]:
        tables.append(_divergence_table(differing))
    if drafting := report.drafting:
        tables.append(_drafts_table(report, drafting))
        cells = [Cell(m.block_efficiency, interval=m.interval) for m in report.methods]
        bars = line_of("tokens per serial call", dict(enumerate(cells)))
        names = [method.label for method in report.methods]
        charts = [
            Chart("methods", "Block efficiency", BARS, "", bars.label, [bars], names),
            _accepted_chart(drafting),
        ]
    return Exhibit(
        "methods",
        "Methods",
        "",
        "Greedy decoding of the same prompts by every method.",
        tables,
        charts,
        notes=report.notes,
        facts={
            "model": report.model,
            "settings": report.settings,
            "versions": report.versions,
            "task": report.task,
            "device": report.device,
            "created": report.created,
        },
    )


def _methods_table(report: EvaluationReport) -> Table:
    best = report.best
    rows = []
    for method in report.methods:
        cells = [
            Cell(method.block_efficiency, interval=method.interval),
            _percent_cell(method.gain, method.gain_interval),
            Cell(method.serial_calls),
            Cell(method.tokens),
            Cell(method.seconds),
            Cell(method.speedup),
            Cell(text=method.verdict, tone=_TONES[method.agreement]),
        ]
        rows.append(Row(method.marked_label, cells, strong=method is best))
    columns = [
        Column("Block efficiency"),
        Column("Gain over BPD", digits=1, unit="+%"),
        Column("Serial calls", digits=0),
        Column("Tokens", digits=0),
        Column("Wall time", unit="s"),
        Column("Speed-up"),
        Column("Output"),
    ]
    intervals = "95 % bootstrap interval over prompts"
    notes = [f"{m.label}: {m.note}." for m in report.methods if m.note]
    title = "Block efficiency and time"
    return Table("methods", title, "Method", columns, rows, " ".join(notes), intervals)


def _percent_cell(
    share: float | None, interval: tuple[float, float] | None = None
) -> Cell:
    if share is None:
        return Cell()
    if interval is not None:
        interval = 100 * interval[0], 100 * interval[1]
    return Cell(100 * share, interval=interval)


def _drafts_table(report: EvaluationReport, drafting: Sequence[MethodSummary]) -> Table:
    best = report.best
    rows = []
    for method in drafting:
        entropies = [f"{method.entropies[i]:.2f}" for i in (0, -1) if method.entropies]
        cells = [
            Cell(method.nodes),
            _percent_cell(method.accepted[0] if method.accepted else None),
            _percent_cell(method.repeated),
            Cell(method.longest_run),
            Cell(text=" … ".join(dict.fromkeys(entropies))),
        ]
        rows.append(Row(method.label, cells, strong=method is best))
    return Table(
        "drafts",
        "Statistics of the drafts",
        "Method",
        [
            Column("Tokens verified", digits=1),
            Column("No gain", digits=1, unit="%"),
            Column("Equal neighbours", digits=1, unit="%"),
            Column("Longest run"),
            Column("Entropy of the heads"),
        ],
        rows,
        "Draft tokens verified per serial call; share of calls that accept only one "
        "token; equal neighbours and runs in the best-ranked draft; entropy of head 2 "
        "… the last head, in nats.",
    )


def _divergence_table(differing: Sequence[MethodSummary]) -> Table:
    rows = []
    for method in differing:
        values = method.divergence or {}
        of = round(method.differing / values["rate"])
        cells = [Cell(method.differing), Cell(of), Cell(values["first"])]
        rows.append(Row(method.label, [*cells, Cell(values["gap"])]))
    return Table(
        "divergence",
        "Texts that differ from greedy decoding",
        "Method",
        [
            Column("Differ", digits=0),
            Column("Texts", digits=0),
            Column("First token", digits=0),
            Column("Logit gap", digits=4),
        ],
        rows,
        "Earliest token that differs; at it, the model’s largest logit minus the lower "
        "of the two tokens’ logits, the median over texts.",
    )


def _accepted_chart(drafting: Sequence[MethodSummary]) -> Chart:
    series = [
        line_of(
            method.label,
            {
                count: 100 * share
                for count, share in enumerate(method.accepted, start=1)
            },
        )
        for method in drafting
    ]
    title = "Accepted tokens per serial call"
    return Chart("accepted", title, LINES, "accepted tokens", "% of calls", series)


def loss_charts(rows: Sequence[Mapping[str, float]]) -> list[Chart]:
    """Charts of the logged losses by training step.

    Those of each head have a chart for training and one for validation, because 2 L
    lines in one cannot be told apart. Other keys and non-finite values are ignored.
    """
    charts: dict[str, dict[str, list[tuple[float, float]]]] = {t: {} for t in _LOSSES}
    for row in rows:
        for key, value in row.items():
            match = _LOSS.fullmatch(key)
            if match is None or not math.isfinite(value):
                continue
            validation, head = match.groups()
            line = "validation" if validation else "training"
            chart = f"loss_heads_{line}" if head else "loss"
            lines = charts[chart]
            name = f"head {head}" if head else line
            lines.setdefault(name, []).append((row["step"], value))
    return [
        Chart(
            name,
            _LOSSES[name],
            LINES,
            "training step",
            "loss (nats)",
            [_line(label, points) for label, points in lines.items()],
        )
        for name, lines in charts.items()
        if lines
    ]


def _line(label: str, points: list[tuple[float, float]]) -> Series:
    """A line of at most `_POINTS` points; validation is dashed."""
    points = sorted(points)
    size = math.ceil(len(points) / _POINTS)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    x, y = (
        [sum(point[axis] for point in run) / len(run) for run in runs]
        for axis in (0, 1)
    )
    return Series(label, x, y, dashed=label == "validation")


def key_figures(report: EvaluationReport) -> list[KeyFigure]:
    """The key numbers of the best method."""
    best = report.best
    if best is None:
        return []
    saved = 1 - best.serial_calls / best.tokens if best.tokens else None
    differing = sum(method.differing for method in report.methods)
    ties = differing and differing == sum(m.near_ties for m in report.methods)
    fastest = report.fastest
    speed = MISSING if best.speedup is None else f"{best.speedup:.2f} ×"
    note = best.label
    if fastest is not None and fastest is not best:
        note = f"fastest: {fastest.marked_label}, {fastest.speedup:.2f} ×"
    return [
        KeyFigure("Block efficiency", f"{best.block_efficiency:.2f}", best.label),
        KeyFigure("Gain over BPD", percent(best.gain), "in block efficiency"),
        KeyFigure(
            "Serial calls saved",
            percent(saved, sign=False),
            "against one call per token",
        ),
        KeyFigure("Speed-up", speed, note),
        KeyFigure(
            "Outputs that differ",
            str(differing),
            "all at near-ties" if ties else "from greedy decoding",
        ),
    ]
