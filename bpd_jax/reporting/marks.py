"""Colours, shapes and tooltips of the series of a chart; labels of its points."""

import dataclasses
from collections.abc import Sequence

from bpd_jax.reporting.axes import text_width
from bpd_jax.reporting.exhibits import BARS, LINES, Chart, Series

SIZE = 3.6
"""Half the size of a mark in pixels."""

_HUES = 8
# Longer lines have about this number of marks.
_MARKED = 20
# Offsets of a mark's corners from its centre, for size 1; a circle has none.
_SHAPES: list[list[tuple[float, float]]] = [
    [],
    [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    [(0, -1.2), (1.15, 0.85), (-1.15, 0.85)],
    [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    [(0, 1.2), (1.15, -0.85), (-1.15, -0.85)],
]


LABEL_SIZE = 11.0
# Half the size of a point.
_POINT = 6.0
# Share of a label's area that may be covered or outside the frame.
_MOST_OVERLAP = 0.2
# Offsets of the text's anchor from its point, by preference.
_OFFSETS = [
    (9, 4, "start"),
    (-9, 4, "end"),
    (0, -9, "middle"),
    (0, 17, "middle"),
    (7, -6, "start"),
    (7, 14, "start"),
    (-7, -6, "end"),
    (-7, 14, "end"),
]


@dataclasses.dataclass(frozen=True)
class Style:
    """The style of a series: CSS colour, index of the shape, whether it is dashed."""

    colour: str
    shape: int
    dashed: bool

    @property
    def paint(self) -> str:
        """The CSS of the marks: hollow if dashed."""
        return f"{'stroke' if self.dashed else 'fill'}:{self.colour}"

    @property
    def corners(self) -> list[tuple[float, float]]:
        """Offsets of the marks' corners for size 1; empty for a circle."""
        return _SHAPES[self.shape]


def styles_of(series: Sequence[Series]) -> list[Style]:
    """Assigns a colour and a shape to every series.

    A dashed series has the colour of the solid series whose label is a prefix of its
    own, such as `BPD` for `BPD, paper`. Otherwise, the only dashed series of a chart is
    grey.
    """
    solid = [each.label for each in series if not each.dashed]
    alone = sum(each.dashed for each in series) == 1
    styles = []
    next_number = len(solid)
    for each in series:
        if not each.dashed:
            number = solid.index(each.label)
        else:
            bases = [label for label in solid if each.label.startswith(label)]
            if bases:
                number = solid.index(max(bases, key=len))
            elif alone:
                styles.append(Style("var(--soft)", 0, True))
                continue
            else:
                number, next_number = next_number, next_number + 1
        colour = f"var(--hue-{number % _HUES})"
        styles.append(Style(colour, number % len(_SHAPES), each.dashed))
    return styles


def is_line(series: Series, chart: Chart) -> bool:
    """Whether a series is a line; in a chart of points, a dashed one without names."""
    return chart.kind == LINES or (series.dashed and not series.names)


def marked(series: Series, chart: Chart) -> list[int]:
    """Indices of the points with marks: all, or some of a long line."""
    if chart.kind != LINES:
        return [] if is_line(series, chart) else list(range(len(series.x)))
    # Marks of neighbouring lines are not above each other.
    number = [each.label for each in chart.series].index(series.label)
    step = -(-len(series.x) // _MARKED)
    return list(range(2 * number % max(step, 1), len(series.x), max(step, 1)))


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


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def intersection(self, other: "Box") -> float:
        """The area of the intersection."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0) * max(height, 0)

    @property
    def area(self) -> float:
        """The area."""
        return (self.right - self.left) * (self.bottom - self.top)


@dataclasses.dataclass(frozen=True)
class Label:
    """A text at its position; `anchor` is SVG's `text-anchor`."""

    text: str
    x: float
    y: float
    anchor: str

    @property
    def box(self) -> Box:
        """The rectangle that the text covers."""
        width = text_width(self.text, LABEL_SIZE)
        left = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return Box(
            left, self.y - 0.8 * LABEL_SIZE, left + width, self.y + 0.25 * LABEL_SIZE
        )


def place_labels(points: Sequence[tuple[float, float, str]], frame: Box) -> list[Label]:
    """Chooses a position for the label of every point, one after another.

    Args:
      points: x, y and name of each point. A point has no label if its name is empty, or
        if every position overlaps with others by more than `_MOST_OVERLAP`.
      frame: rectangle that should contain the labels.
    """
    covered = [
        Box(x - _POINT, y - _POINT, x + _POINT, y + _POINT) for x, y, _ in points
    ]
    labels = []
    for x, y, name in points:
        if not name:
            continue
        choices = [Label(name, x + dx, y + dy, anchor) for dx, dy, anchor in _OFFSETS]
        overlaps = [
            4 * (box.area - box.intersection(frame))
            + sum(map(box.intersection, covered))
            for box in (choice.box for choice in choices)
        ]
        best = choices[overlaps.index(min(overlaps))]
        if min(overlaps) > _MOST_OVERLAP * best.box.area:
            continue
        labels.append(best)
        covered.append(best.box)
    return labels
