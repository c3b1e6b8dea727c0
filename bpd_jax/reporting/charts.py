"""Draws an exhibit's charts as SVG, for a page or as separate files."""

import dataclasses
import functools
import math
import re
from typing import Any

import jinja2
from markupsafe import Markup

from bpd_jax.reporting import axes, marks
from bpd_jax.reporting.axes import Axis, tick_text
from bpd_jax.reporting.exhibits import BARS, LINES, Chart, Series
from bpd_jax.reporting.marks import Style
from bpd_jax.reporting.templates import environment, resource

# Pixels of the drawing: minimum width, height between the axes, right margin.
_WIDTH, _PLOT, _RIGHT = 400, 204, 14
_LEGEND_ROW, _SWATCH = 20, 26
_BAR, _GAP = 12, 16
_SLOPE = math.radians(35)
# Font size and line height of the title of a separate file.
_TITLE, _TITLE_ROW = 14 * 1.08, 19


@dataclasses.dataclass(frozen=True)
class Frame:
    """The size of a drawing and its two axes."""

    width: float
    height: float
    x: Axis
    y: Axis

    @property
    def right(self) -> float:
        """The x coordinate of the right end of horizontal lines."""
        return self.width - _RIGHT

    @property
    def box(self) -> marks.Box:
        """The rectangle between the axes."""
        return marks.Box(self.x.start, self.y.end, self.x.end, self.y.start)


def draw(chart: Chart, standalone: bool = False) -> Markup:
    """Returns the SVG element; it needs the style of `charts.css` around it.

    Args:
      standalone: whether to include the style, and the title above the chart.
    """
    chart = drawable(chart)
    styled = list(zip(chart.series, marks.styles_of(chart.series), strict=True))
    legend, below_legend = _legend(chart, styled)
    frame = frame_of(chart, below_legend)
    lines = axes.wrapped(chart.title, frame.width - 16, _TITLE) if standalone else []
    above = 13 + _TITLE_ROW * len(lines) if standalone else 0
    across = (frame.x.start + frame.x.end) / 2
    up = (frame.y.start + frame.y.end) / 2
    y_label = axes.shortened(chart.y_label, frame.height)
    half = axes.text_width(y_label) / 2
    is_bars = chart.kind == BARS
    marks_css = "/* Marks" + resource("charts.css").partition("/* Marks")[2]
    group = frame.x.position(1) - frame.x.position(0) if is_bars else 0.0
    return Markup(
        _environment()
        .get_template("chart.svg")
        .render(
            chart=chart,
            frame=frame,
            styled=styled,
            legend=legend,
            swatch_width=_SWATCH,
            size=marks.SIZE,
            title_lines=[
                (line, _TITLE_ROW * (1 + number) - above)
                for number, line in enumerate(lines)
            ],
            above=above,
            css=Markup(marks_css) if standalone else "",
            least=0.8 * frame.width * (frame.width > _WIDTH),
            description=description(chart),
            x_ticks=[] if is_bars else _x_ticks(frame),
            categories=[(n, _short(n)) for n in _categories(chart)] if is_bars else [],
            sloping=is_bars and sloping(chart, frame.x.end - frame.x.start),
            across=across,
            up=min(max(up, half + 2), frame.height - half - 2),
            x_label=axes.shortened(
                chart.x_label, 2 * min(across, frame.width - across)
            ),
            y_label=y_label,
            bar_width=min(0.78 * group / max(len(chart.series), 1), 34),
            point_labels=[] if is_bars else _point_labels(chart, frame),
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    derived = environment().overlay()
    derived.tests = derived.tests | {"line": marks.is_line}
    derived.filters = derived.filters | {
        "tick_text": tick_text,
        "words": marks.words,
        "marked": marks.marked,
    }
    return derived


def standalone(chart: Chart) -> str:
    """Returns an SVG file with its style, in the colours of a white page."""
    variables = dict[str, str]()
    for name in ("base.css", "charts.css"):
        text = resource(name)
        light = text[: text.index("}")]
        variables |= dict(re.findall(r"(--[\w-]+):\s*([^;]+);", light))
    text = f"{draw(chart, standalone=True)}\n"
    return re.sub(r"var\((--[\w-]+)\)", lambda m: variables.get(m[1], m[0]), text)


def description(chart: Chart) -> str:
    """A description of the chart for screen readers."""
    parts = []
    for series in chart.series:
        if series.x:
            first, last = series.y[0], series.y[-1]
            parts.append(f"{series.label} from {first:.3g} to {last:.3g}")
    return f"{chart.title}. {chart.y_label} by {chart.x_label}: {'; '.join(parts)}."


def drawable(chart: Chart) -> Chart:
    """Leaves out points that cannot be drawn: NaN, or not positive on a log axis."""
    series = []
    for each in chart.series:
        drawn = [
            index
            for index, (x, y) in enumerate(zip(each.x, each.y, strict=True))
            if math.isfinite(x)
            and math.isfinite(y)
            and (x > 0 or not chart.logarithmic)
        ]
        fields: dict[str, Any] = {
            name: [values[index] for index in drawn] if values else []
            for name in ("x", "y", "low", "high", "names")
            for values in [getattr(each, name)]
        }
        series.append(dataclasses.replace(each, **fields))
    return dataclasses.replace(chart, series=series)


def has_points(chart: Chart) -> bool:
    """Whether anything of the chart can be drawn."""
    return any(series.x for series in drawable(chart).series)


def frame_of(chart: Chart, top: float = 10) -> Frame:
    """Computes the size of a drawing whose plot area begins at `top`."""
    values = [v for s in chart.series for v in (*s.y, *s.low, *s.high)]
    if chart.kind == BARS:
        values.append(0.0)
    y_ticks = axes.ticks(min(values, default=0.0), max(values, default=1.0))
    left = 32 + max(axes.text_width(tick_text(tick), 11.5) for tick in y_ticks)
    width, below = float(_WIDTH), 44.0
    if chart.kind == BARS:
        names = _categories(chart)
        group = _BAR * len(chart.series) + _GAP
        width = max(width, left + _RIGHT + group * len(names))
        if sloping(chart, width - left - _RIGHT):
            longest = max(axes.text_width(_short(name), 11.5) for name in names)
            below += longest * math.sin(_SLOPE)
            # The first name extends to the left.
            reach = longest * math.cos(_SLOPE) + 6
            left = max(left, reach - (width - left - _RIGHT) / len(names) / 2)
    bottom = top + _PLOT
    y = Axis(y_ticks[0], y_ticks[-1], bottom, top, y_ticks)
    return Frame(width, bottom + below, _x_axis(chart, left, width - _RIGHT), y)


def is_wide(chart: Chart) -> bool:
    """Whether the chart is wider than the minimum, so that it needs its own row."""
    return frame_of(chart).width > _WIDTH


def sloping(chart: Chart, width: float) -> bool:
    """Whether the names of bars are too long to be horizontal."""
    names = _categories(chart)
    available = width / max(len(names), 1) - 4
    return any(axes.text_width(_short(name), 11.5) > available for name in names)


def _short(name: str) -> str:
    return axes.shortened(name, 130, 11.5)


def _categories(chart: Chart) -> list[str]:
    highest = max((int(x) for series in chart.series for x in series.x), default=-1)
    missing = range(len(chart.categories), highest + 1)
    return [*chart.categories, *(str(index + 1) for index in missing)]


def _x_axis(chart: Chart, start: float, end: float) -> Axis:
    values = [value for series in chart.series for value in series.x] or [0.0, 1.0]
    if chart.kind == BARS:
        # Category i covers the interval from i - 1/2 to i + 1/2.
        return Axis(-0.5, max(len(_categories(chart)), 1) - 0.5, start, end, [])
    if chart.logarithmic:
        ticks = axes.log_ticks(values)
        return Axis(min(values), max(values), start + 8, end - 8, ticks, True)
    if chart.kind == LINES:
        ticks = axes.ticks_inside(values)
        return Axis(min(values), max(values), start + 8, end - 8, ticks)
    ticks = axes.ticks(min(values), max(values))
    return Axis(ticks[0], ticks[-1], start, end, ticks)


def _legend(
    chart: Chart, styled: list[tuple[Series, Style]]
) -> tuple[list[tuple[Series, Style, float, float, str]], float]:
    """Entries of the legend, and the y coordinate below it."""
    if len(chart.series) < 2 and not any(series.dashed for series in chart.series):
        return [], 12.0
    entries = []
    x, y = 8.0, 12.0
    for series, style in styled:
        text = axes.shortened(series.label, _WIDTH - _SWATCH - 24, 11.5)
        width = _SWATCH + axes.text_width(text, 11.5) + 12
        if x > 8 and x + width > _WIDTH:
            x, y = 8.0, y + _LEGEND_ROW
        entries.append((series, style, x, y, text))
        x += width
    return entries, y + 24


def _x_ticks(frame: Frame) -> list[tuple[float, str]]:
    """Ticks with their labels; a label that would touch the previous one is empty."""
    labelled_ticks = []
    free = -math.inf
    for tick in frame.x.ticks:
        x, text = frame.x.position(tick), tick_text(tick)
        half = axes.text_width(text, 11.5) / 2
        fits = x - half > free
        labelled_ticks.append((x, text if fits else ""))
        free = x + half + 3 if fits else free
    return labelled_ticks


def _point_labels(chart: Chart, frame: Frame) -> list[marks.Label]:
    points = [
        (
            frame.x.position(x),
            frame.y.position(y),
            axes.shortened(name, 120, marks.LABEL_SIZE),
        )
        for series in chart.series
        for x, y, name in zip(
            series.x, series.y, series.names or [""] * len(series.x), strict=True
        )
    ]
    return marks.place_labels(points, frame.box)
