"""Colours, shapes and tooltips of the series of a chart."""

import dataclasses
from collections.abc import Sequence

from bpd_jax.reporting.exhibits import BARS, LINES, Chart, Series

SIZE = 3.6
"""Pixels of half a mark."""

_HUES = 8
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
    """The style of a series: CSS colour, index of the shape, whether it is dashed."""

    colour: str
    shape: int
    dashed: bool

    @property
    def paint(self) -> str:
        """The CSS of its marks: hollow if dashed."""
        return f"{'stroke' if self.dashed else 'fill'}:{self.colour}"

    @property
    def corners(self) -> list[tuple[float, float]]:
        """Of its marks, for size 1; none of a circle."""
        return _SHAPES[self.shape]


def styles_of(series: Sequence[Series]) -> list[Style]:
    """Gives every series a colour and a shape.

    A dashed one has the colour of the series whose label its own begins with, as
    `BPD, paper` begins with `BPD`; the only dashed one of a chart is grey otherwise.
    """
    solid = [each.label for each in series if not each.dashed]
    alone = sum(each.dashed for each in series) == 1
    styles = []
    next_number = len(solid)
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
                number, next_number = next_number, next_number + 1
        colour = f"var(--hue-{number % _HUES})"
        styles.append(Style(colour, number % len(_SHAPES), each.dashed))
    return styles


def is_line(series: Series, chart: Chart) -> bool:
    """Among points, a dashed series without names is a line fitted to them."""
    return chart.kind == LINES or (series.dashed and not series.names)


def is_marked(series: Series, chart: Chart) -> bool:
    """Whether its points have marks: those of a line only if they are few."""
    if chart.kind == LINES:
        return len(series.x) <= _MARKED
    return not is_line(series, chart)


def words(series: Series, index: int, chart: Chart) -> str:
    """The tooltip of a mark."""
    x = series.x[index]
    name = series.names[index] if series.names else ""
    if not name and chart.categories:
        name = chart.categories[int(x)]
    elif not series.names and chart.kind != BARS:
        name = f"at {x:.4g}"
    text = f"{series.label}{f', {name}' if name else ''}: {_number(series.y[index])}"
    if series.low and series.high:
        text += f" ({_number(series.low[index])} to {_number(series.high[index])})"
    return text


def _number(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")
