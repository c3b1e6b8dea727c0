"""Placement of labels next to the points of a chart, with little overlap."""

import dataclasses
from collections.abc import Sequence

from bpd_jax.reporting.axes import text_width

SIZE = 11.0
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
        width = text_width(self.text, SIZE)
        left = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return Box(left, self.y - 0.8 * SIZE, left + width, self.y + 0.25 * SIZE)


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
