"""What stands for numbers in a chart: lines with bands, points, bars with whiskers."""

import dataclasses
from collections.abc import Sequence

from bpd_jax.reporting.axes import Axis
from bpd_jax.reporting.exhibits import BARS, LINES, Chart, Series
from bpd_jax.reporting.wording import escaped

_HUES = 8
_SIZE = 3.6
# Points of a line are marked only while they can be told apart.
_MARKED = 20
# Offsets of a mark's corners from its middle, for size 1; none is a circle.
_SHAPES: list[list[tuple[float, float]]] = [
    [],
    [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    [(0, -1.2), (1.15, 0.85), (-1.15, 0.85)],
    [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    [(0, 1.2), (1.15, -0.85), (-1.15, -0.85)],
]


@dataclasses.dataclass(frozen=True)
class Style:
    """How a series looks: a CSS colour, the number of its shape, whether dashed."""

    colour: str
    shape: int
    dashed: bool


def styles_of(series: Sequence[Series]) -> list[Style]:
    """Gives every series a colour and a shape.

    A dashed one has the colour of the series whose label its own begins with, as
    `BPD, paper` begins with `BPD`; the only dashed one of a chart is grey otherwise.
    """
    solid = [each.label for each in series if not each.dashed]
    alone = sum(each.dashed for each in series) == 1
    styles = []
    others = len(solid)
    for each in series:
        if not each.dashed:
            number = solid.index(each.label)
        else:
            owners = [label for label in solid if each.label.startswith(label)]
            if owners:
                number = solid.index(max(owners, key=len))
            elif alone:
                styles.append(Style("var(--soft)", 0, True))
                continue
            else:
                number, others = others, others + 1
        colour = f"var(--hue-{number % _HUES})"
        styles.append(Style(colour, number % len(_SHAPES), each.dashed))
    return styles


def lines_and_points(
    chart: Chart, styles: Sequence[Style], x: Axis, y: Axis
) -> list[str]:
    """Bands first, then lines, then points: nothing that matters is covered."""
    shapes = []
    pairs = list(zip(chart.series, styles, strict=True))
    for series, style in pairs:
        if chart.kind == LINES and series.low and series.high:
            shapes.append(_band(series, style, x, y))
    for series, style in pairs:
        if _is_line(chart, series):
            shapes.append(_line(series, style, x, y))
    for series, style in pairs:
        whiskers = chart.kind != LINES and series.low and series.high
        if whiskers:
            shapes += [
                _whisker(x.place(at), y.place(low), y.place(high), style)
                for at, low, high in zip(series.x, series.low, series.high, strict=True)
            ]
        if _is_marked(chart, series):
            shapes += _points(series, style, x, y)
    return shapes


def _is_line(chart: Chart, series: Series) -> bool:
    """Among points, a dashed series without names is a line fitted to them."""
    return chart.kind == LINES or (series.dashed and not series.names)


def _is_marked(chart: Chart, series: Series) -> bool:
    if chart.kind == LINES:
        return len(series.x) <= _MARKED
    return not _is_line(chart, series)


def bars(chart: Chart, styles: Sequence[Style], x: Axis, y: Axis) -> list[str]:
    """Bars side by side for every category; those of dashed series are hollow."""
    group = x.place(1) - x.place(0)
    width = min(0.78 * group / max(len(chart.series), 1), 34)
    shapes = []
    for number, (series, style) in enumerate(zip(chart.series, styles, strict=True)):
        shift = (number - len(chart.series) / 2) * width
        for index, (at, value) in enumerate(zip(series.x, series.y, strict=True)):
            left, zero, end = x.place(at) + shift, y.place(0), y.place(value)
            category = chart.categories[int(at)] if chart.categories else ""
            shapes.append(
                f'<rect class="bar-mark{" hollow" * style.dashed}" '
                f'x="{left + 0.75:.2f}" y="{min(zero, end):.2f}" '
                f'width="{width - 1.5:.2f}" height="{abs(zero - end):.2f}" '
                f'style="{_paint(style, filled=not style.dashed)}">'
                f"<title>{escaped(_words(series, index, category))}</title></rect>"
            )
            if series.low and series.high:
                shapes.append(
                    _whisker(
                        left + width / 2,
                        y.place(series.low[index]),
                        y.place(series.high[index]),
                        None,
                    )
                )
    return shapes


def swatch(chart: Chart, series: Series, style: Style, x: float, y: float) -> str:
    """The sign of a series in the legend, with its left end at (x, y)."""
    if chart.kind == BARS:
        return (
            f'<rect class="bar-mark{" hollow" * style.dashed}" x="{x + 4:g}" '
            f'y="{y - 6:g}" width="12" height="12" '
            f'style="{_paint(style, filled=not style.dashed)}"/>'
        )
    shapes = ""
    if _is_line(chart, series):
        shapes += (
            f'<path class="line{" dashed" * style.dashed}" d="M{x:g} {y:g}h20" '
            f'style="stroke:{style.colour}"/>'
        )
    if _is_marked(chart, series):
        shapes += _mark(style, x + 10, y, "")
    return shapes


def _words(series: Series, index: int, place: str) -> str:
    """What a mark stands for, as shown when it is pointed at."""
    name = series.names[index] if series.names else place
    text = f"{series.label}{f', {name}' if name else ''}: {_number(series.y[index])}"
    if series.low and series.high:
        text += f" ({_number(series.low[index])} to {_number(series.high[index])})"
    return text


def _number(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")


def _paint(style: Style, *, filled: bool) -> str:
    return f"{'fill' if filled else 'stroke'}:{style.colour}"


def _band(series: Series, style: Style, x: Axis, y: Axis) -> str:
    there = list(zip(series.x, series.high, strict=True))
    back = list(zip(series.x, series.low, strict=True))[::-1]
    corners = " ".join(f"{x.place(a):g},{y.place(b):g}" for a, b in there + back)
    return f'<polygon class="band" points="{corners}" style="fill:{style.colour}"/>'


def _line(series: Series, style: Style, x: Axis, y: Axis) -> str:
    points = zip(series.x, series.y, strict=True)
    corners = " ".join(f"{x.place(a):g},{y.place(b):g}" for a, b in points)
    return (
        f'<polyline class="line{" dashed" * style.dashed}" points="{corners}" '
        f'style="stroke:{style.colour}"><title>{escaped(series.label)}</title>'
        "</polyline>"
    )


def _points(series: Series, style: Style, x: Axis, y: Axis) -> list[str]:
    return [
        _mark(
            style,
            x.place(at),
            y.place(value),
            _words(series, index, "" if series.names else f"at {at:.4g}"),
        )
        for index, (at, value) in enumerate(zip(series.x, series.y, strict=True))
    ]


def _mark(style: Style, x: float, y: float, words: str) -> str:
    title = f"<title>{escaped(words)}</title>" if words else ""
    paint = (
        f'class="mark{" open" * style.dashed}" '
        f'style="{_paint(style, filled=not style.dashed)}"'
    )
    corners = _SHAPES[style.shape]
    if not corners:
        return f'<circle {paint} cx="{x:g}" cy="{y:g}" r="{_SIZE}">{title}</circle>'
    points = " ".join(f"{x + _SIZE * a:.2f},{y + _SIZE * b:.2f}" for a, b in corners)
    return f'<polygon {paint} points="{points}">{title}</polygon>'


def _whisker(x: float, low: float, high: float, style: Style | None) -> str:
    colour = style.colour if style else "var(--ink)"
    return (
        f'<path class="whisker" d="M{x - 3:g} {low:g}h6M{x:g} {low:g}V{high:g}'
        f'M{x - 3:g} {high:g}h6" style="stroke:{colour}"/>'
    )
