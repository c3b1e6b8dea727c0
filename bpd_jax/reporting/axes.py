"""Axes of charts: positions in pixels, and ticks."""

import dataclasses
import math
from collections.abc import Sequence

_NARROW, _WIDE = frozenset("iljtfrI.,:;'|!()[]-· "), frozenset("mwMW@%—→")


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a chart.

    Attributes:
      first, last: values at the two ends.
      start, end: pixels of the two ends; for a y axis, `start` is the bottom.
      ticks: values with a tick.
      logarithmic: whether the scale is logarithmic.
    """

    first: float
    last: float
    start: float
    end: float
    ticks: list[float]
    logarithmic: bool = False

    def position(self, value: float) -> float:
        """The coordinate of a value in pixels; the middle if the axis has one value."""
        value, first, last = map(self._transformed, (value, self.first, self.last))
        share = (value - first) / (last - first) if last > first else 0.5
        return round(self.start + share * (self.end - self.start), 2)

    def _transformed(self, value: float) -> float:
        return math.log(value) if self.logarithmic else value


def ticks(low: float, high: float) -> list[float]:
    """Returns about five round numbers from at most `low` to at least `high`."""
    raw = (high - low or abs(high) or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= raw * 0.9999)
    # A quotient such as 0.3 / 0.1 is slightly below an integer.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * index, 12) for index in range(first, max(last, first + 1) + 1)]


def ticks_inside(values: Sequence[float]) -> list[float]:
    """Ticks between the smallest and the largest value.

    A few integers, such as numbers of heads, are ticks themselves.
    """
    distinct = sorted(set(values))
    if len(distinct) <= 16 and all(value == int(value) for value in distinct):
        return distinct
    return [
        t for t in ticks(distinct[0], distinct[-1]) if distinct[0] <= t <= distinct[-1]
    ]


def log_ticks(values: Sequence[float]) -> list[float]:
    """Ticks of a logarithmic axis: the values if they are few, else 1, 2, 5, 10, …"""
    distinct = sorted(set(values))
    if len(distinct) <= 8:
        return distinct
    lowest, highest = (
        math.floor(math.log10(distinct[0])),
        math.ceil(math.log10(distinct[-1])),
    )
    return [
        round(unit * 10.0**power, 12)
        for power in range(lowest, highest + 1)
        for unit in (1, 2, 5)
        if distinct[0] <= unit * 10.0**power <= distinct[-1]
    ]


def tick_text(value: float) -> str:
    """Formats the number at a tick.

    >>> tick_text(-0.5), tick_text(20000)
    ('−0.5', '20,000')
    """
    return f"{value:,.10g}".replace("-", "−")


def text_width(text: str, size: float = 12) -> float:
    """An approximate upper bound for the width of a text in pixels.

    The browser's metrics are not available when an SVG is drawn.
    """
    return size * sum(
        0.38
        if character in _NARROW
        else 0.95
        if character in _WIDE or ord(character) > 0x2E7F
        else 0.66
        for character in text
    )


def wrapped(text: str, width: float, size: float = 12) -> list[str]:
    """Wraps a text to lines of a width, between words if possible."""
    lines = [""]
    for word in text.split():
        line = f"{lines[-1]} {word}".strip()
        if text_width(line, size) > width and lines[-1]:
            lines.append("")
            line = word
        while text_width(line, size) > width and len(line) > 1:
            fitting = len(line) - 1
            while fitting > 1 and text_width(line[:fitting], size) > width:
                fitting -= 1
            lines[-1], line = line[:fitting], line[fitting:]
            lines.append("")
        lines[-1] = line
    return lines


def shortened(text: str, width: float, size: float = 12) -> str:
    """Truncates a text to a width, with … at its end."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(f"{text}…", size) > width:
        text = text[:-1]
    return f"{text}…"
