"""Loss curves as inline SVG: the sum, and one line per head."""

import math
import re
from collections.abc import Mapping, Sequence

from bpd_jax.reporting.axes import ticks
from bpd_jax.reporting.records import Report
from bpd_jax.reporting.wording import escaped

Series = dict[str, list[tuple[float, float]]]
"""Name of a line → its (step, loss) points."""

_KEY = re.compile(r"(validation_)?loss(?:_head_(\d+))?")
_VALIDATION = ", validation"
_POINTS = 200
_COLOURS = 8
# The drawing and the margins around its axes, in pixels.
_WIDTH, _HEIGHT = 500, 310
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 98, 10, 46


def section(report: Report) -> str:
    """Returns the body of the section, or nothing if there are no curves."""
    total, heads = series_of(report.curves)
    charts = [
        f'<figure class="card chart"><h3>{title}</h3><div class="scroll" '
        f'role="region" aria-label="{title}" tabindex="0">{draw(title, series)}</div>'
        "</figure>"
        for title, series in [
            ("Loss of every head", heads),
            ("Loss of all heads together", total),
        ]
        if series
    ]
    if not charts:
        return ""
    return (
        "<p>Cross-entropy in nats per token. Head 1 is the language model itself, head "
        "j predicts j tokens ahead; dashed lines are validation data.</p>"
        f'<div class="charts">{"".join(charts)}</div>'
    )


def series_of(rows: Sequence[Mapping[str, float]]) -> tuple[Series, Series]:
    """Splits rows of metrics into the total losses and those per head.

    Keys that are no losses, and values that are not finite, are left out.
    """
    total: Series = {}
    heads: Series = {}
    for row in rows:
        for key, value in row.items():
            match = _KEY.fullmatch(key)
            if match is None or not math.isfinite(value):
                continue
            validation, head = match.groups()
            name = f"head {head}" if head else "training"
            if validation:
                name = name + _VALIDATION if head else "validation"
            chosen = heads if head else total
            chosen.setdefault(name, []).append((row["step"], value))
    return total, heads


def draw(title: str, series: Series) -> str:
    """Returns one SVG chart; every line has its name at its end.

    Args:
      title: what the lines are, for the description that is read aloud.
      series: the lines; one named `…, validation` has the colour of the line it
        belongs to, dashed and without a name of its own.
    """
    lines = {name: _thinned(sorted(points)) for name, points in series.items()}
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    # The y axis begins and ends on a tick; the x axis with the data.
    y_ticks = ticks(min(ys), max(ys))
    x_ticks = [tick for tick in ticks(min(xs), max(xs)) if min(xs) <= tick <= max(xs)]

    def place(x: float, y: float) -> tuple[float, float]:
        across = _share(x, min(xs), max(xs)) * (_WIDTH - _LEFT - _RIGHT)
        up = _share(y, y_ticks[0], y_ticks[-1]) * (_HEIGHT - _TOP - _BOTTOM)
        return round(_LEFT + across, 1), round(_HEIGHT - _BOTTOM - up, 1)

    shapes = [
        *(_horizontal(place(xs[0], tick)[1], tick) for tick in y_ticks),
        *(_vertical(place(tick, ys[0])[0], tick) for tick in x_ticks),
        _axis_names(),
    ]
    names = list(dict.fromkeys(name.removesuffix(_VALIDATION) for name in lines))
    ends = {name: place(*lines[name][-1]) for name in names if name in lines}
    label_heights = _apart({name: y for name, (_, y) in ends.items()})
    for name, points in lines.items():
        rank = names.index(name.removesuffix(_VALIDATION)) / max(len(names) - 1, 1)
        dashed = " validation" if name.endswith("validation") else ""
        drawn = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        label = _label(name, *ends[name], label_heights[name]) if name in ends else ""
        shapes.append(
            f'<g style="--colour:var(--series-{round(rank * (_COLOURS - 1))})">'
            f'<polyline class="line{dashed}" points="{drawn}"/>{label}</g>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escaped(_description(title, lines))}">{"".join(shapes)}</svg>'
    )


def _description(title: str, lines: Series) -> str:
    ends = "; ".join(
        f"{name} from {points[0][1]:.2f} to {points[-1][1]:.2f}"
        for name, points in lines.items()
    )
    return f"{title} by training step: {ends}."


def _horizontal(y: float, tick: float) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        f'<text class="soft" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}'
        "</text>"
    )


def _vertical(x: float, tick: float) -> str:
    bottom = _HEIGHT - _BOTTOM
    return (
        f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>'
        f'<text class="soft" x="{x}" y="{bottom + 19}" text-anchor="middle">{tick:,g}'
        "</text>"
    )


def _axis_names() -> str:
    middle = (_HEIGHT - _BOTTOM + _TOP) / 2
    return (
        f'<text class="soft" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" '
        'text-anchor="middle">training step</text>'
        f'<text class="soft" transform="translate(12 {middle}) rotate(-90)" '
        'text-anchor="middle">loss (nats)</text>'
    )


def _label(name: str, x: float, y: float, height: float) -> str:
    """The name of a line, tied to its end."""
    left = _WIDTH - _RIGHT + 16
    return (
        f'<line class="tie" x1="{x + 3}" y1="{y}" x2="{left - 3}" y2="{height}"/>'
        f'<text class="name" x="{left}" y="{height + 4}">{escaped(name)}</text>'
    )


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most `_POINTS` points, each the mean of a run of neighbours."""
    size = math.ceil(len(points) / _POINTS)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run))
        for run in runs
    ]


def _apart(heights: dict[str, float]) -> dict[str, float]:
    """Moves labels so that they keep their distance and their order on the page.

    Example: labels wanted at 20, 22 and 90 go to 20, 36 and 90.
    """
    distance = min(16.0, (_HEIGHT - _BOTTOM - _TOP) / max(len(heights), 1))
    names = sorted(heights, key=lambda name: heights[name])
    placed: dict[str, float] = {}
    lowest = -math.inf
    for name in names:
        lowest = placed[name] = max(heights[name], lowest + distance)
    highest = float(_HEIGHT - _BOTTOM)
    for name in reversed(names):
        placed[name] = min(placed[name], highest)
        highest = placed[name] - distance
    return placed
