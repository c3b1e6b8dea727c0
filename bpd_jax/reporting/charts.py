"""An exhibit's charts as SVG, for a page or as files of their own."""

import dataclasses
import importlib.resources
import math
import re
from typing import Any

from bpd_jax.reporting import axes, labels, marks
from bpd_jax.reporting.axes import Axis, tick_text
from bpd_jax.reporting.exhibits import BARS, LINES, Chart, Series
from bpd_jax.reporting.marks import Style
from bpd_jax.reporting.wording import escaped

# Pixels of the drawing: the least width, the height between the axes, margins.
_WIDTH, _PLOT, _RIGHT = 400, 204, 14
_LEGEND_ROW, _SWATCH = 20, 26
_BAR, _GAP = 12, 16
_SLOPE = math.radians(35)
# The title of a file of its own: its font, which is bold, and its lines.
_TITLE, _TITLE_ROW = 14 * 1.08, 19


@dataclasses.dataclass(frozen=True)
class Frame:
    """Where things are: the drawing's size and its two axes."""

    width: float
    height: float
    x: Axis
    y: Axis

    @property
    def box(self) -> labels.Box:
        """The rectangle between the axes."""
        return labels.Box(self.x.start, self.y.end, self.x.end, self.y.start)


def draw(chart: Chart) -> str:
    """Returns the SVG element; it needs the style of `charts.css` around it."""
    chart = drawable(chart)
    styles = marks.styles_of(chart.series)
    legend, below_legend = _legend(chart, styles)
    frame = frame_of(chart, below_legend)
    draw_series = marks.bars if chart.kind == BARS else marks.lines_and_points
    shapes = [
        *legend,
        *_horizontal_lines(frame),
        *(_category_names(chart, frame) if chart.kind == BARS else _x_ticks(frame)),
        *_axis_names(chart, frame),
        *draw_series(chart, styles, frame.x, frame.y),
        *_point_names(chart, frame),
    ]
    least = f' style="min-width:{0.8 * frame.width:.0f}px"' * (frame.width > _WIDTH)
    return (
        f'<svg class="plot" viewBox="0 0 {frame.width:g} {frame.height:g}" '
        f'width="{frame.width:g}" role="img"{least} '
        f'aria-label="{escaped(description(chart))}">{"".join(shapes)}</svg>'
    )


def standalone(chart: Chart) -> str:
    """Returns an SVG file with its style in it, in the colours of a white page."""
    folder = importlib.resources.files("bpd_jax.reporting")
    variables = dict[str, str]()
    for name in ("base.css", "charts.css"):
        text = (folder / name).read_text(encoding="utf-8")
        light = text[: text.index("}")]
        variables |= dict(re.findall(r"(--[\w-]+):\s*([^;]+);", light))
    style = (folder / "charts.css").read_text(encoding="utf-8").partition("/* Marks")[2]
    svg = draw(chart)
    width, height = map(float, re.findall(r'viewBox="0 0 (\S+) (\S+)"', svg)[0])
    lines = axes.wrapped(chart.title, width - 16, _TITLE)
    above = 13 + _TITLE_ROW * len(lines)
    title = "".join(
        f'<text class="title" x="8" y="{_TITLE_ROW * (1 + number) - above:g}">'
        f"{escaped(line)}</text>"
        for number, line in enumerate(lines)
    )
    head, body = svg.split(">", 1)
    head = head.replace(
        f'viewBox="0 0 {width:g} {height:g}"',
        f'xmlns="http://www.w3.org/2000/svg" viewBox="0 {-above} {width:g} '
        f'{height + above:g}" height="{height + above:g}"',
    )
    white = (
        f'<rect x="0" y="{-above}" width="100%" height="100%" style="fill:{"#fff"}"/>'
    )
    text = f"{head}><style>/* Marks{style}</style>{white}{title}{body}\n"
    return re.sub(r"var\((--[\w-]+)\)", lambda m: variables.get(m[1], m[0]), text)


def description(chart: Chart) -> str:
    """What is drawn, in words that can be read aloud."""
    parts = []
    for series in chart.series:
        if series.x:
            first, last = series.y[0], series.y[-1]
            parts.append(f"{series.label} from {first:.3g} to {last:.3g}")
    return f"{chart.title}. {chart.y_label} by {chart.x_label}: {'; '.join(parts)}."


def drawable(chart: Chart) -> Chart:
    """Leaves out points that have no place: of no number, or of none on a log axis."""
    series = []
    for each in chart.series:
        kept = [
            index
            for index, (x, y) in enumerate(zip(each.x, each.y, strict=True))
            if math.isfinite(x)
            and math.isfinite(y)
            and (x > 0 or not chart.logarithmic)
        ]
        fields: dict[str, Any] = {
            name: [values[index] for index in kept] if values else []
            for name in ("x", "y", "low", "high", "names")
            for values in [getattr(each, name)]
        }
        series.append(dataclasses.replace(each, **fields))
    return dataclasses.replace(chart, series=series)


def frame_of(chart: Chart, top: float = 10) -> Frame:
    """Sizes the drawing: `top` is where the space between the axes begins."""
    y_ticks = _y_ticks(chart)
    left = 32 + max(axes.text_width(tick_text(tick), 11.5) for tick in y_ticks)
    width, below = float(_WIDTH), 44.0
    if chart.kind == BARS:
        names = _categories(chart)
        group = _BAR * len(chart.series) + _GAP
        width = max(width, left + _RIGHT + group * len(names))
        if sloping(chart, width - left - _RIGHT):
            longest = max(axes.text_width(_short(name), 11.5) for name in names)
            below += longest * math.sin(_SLOPE)
            # The first name leans out to the left.
            reach = longest * math.cos(_SLOPE) + 6
            left = max(left, reach - (width - left - _RIGHT) / len(names) / 2)
    bottom = top + _PLOT
    y = Axis(y_ticks[0], y_ticks[-1], bottom, top, y_ticks)
    return Frame(width, bottom + below, _x_axis(chart, left, width - _RIGHT), y)


def is_wide(chart: Chart) -> bool:
    """Whether it needs more than the least width, so that it gets a row of its own."""
    return frame_of(chart).width > _WIDTH


def sloping(chart: Chart, width: float) -> bool:
    """Whether the names of bars are too long to stand side by side."""
    names = _categories(chart)
    room = width / max(len(names), 1) - 4
    return any(axes.text_width(_short(name), 11.5) > room for name in names)


def _short(name: str) -> str:
    return axes.shortened(name, 130, 11.5)


def _categories(chart: Chart) -> list[str]:
    highest = max((int(x) for series in chart.series for x in series.x), default=-1)
    missing = range(len(chart.categories), highest + 1)
    return [*chart.categories, *(str(index + 1) for index in missing)]


def _y_ticks(chart: Chart) -> list[float]:
    values = [
        value
        for series in chart.series
        for value in (*series.y, *series.low, *series.high)
    ]
    if chart.kind == BARS:
        values.append(0.0)
    return axes.ticks(min(values, default=0.0), max(values, default=1.0))


def _x_axis(chart: Chart, start: float, end: float) -> Axis:
    values = [value for series in chart.series for value in series.x] or [0.0, 1.0]
    if chart.kind == BARS:
        # Category i takes the space from i - 1/2 to i + 1/2.
        return Axis(-0.5, max(len(_categories(chart)), 1) - 0.5, start, end, [])
    if chart.logarithmic:
        ticks = axes.log_ticks(values)
        return Axis(min(values), max(values), start + 8, end - 8, ticks, True)
    if chart.kind == LINES:
        ticks = axes.ticks_inside(values)
        return Axis(min(values), max(values), start + 8, end - 8, ticks)
    ticks = axes.ticks(min(values), max(values))
    return Axis(ticks[0], ticks[-1], start, end, ticks)


def _legend(chart: Chart, styles: list[Style]) -> tuple[list[str], float]:
    """The legend's shapes, and the height below it where the axes may begin."""
    if len(chart.series) < 2 and not any(series.dashed for series in chart.series):
        return [], 12.0
    shapes = []
    x, y = 8.0, 12.0
    for series, style in zip(chart.series, styles, strict=True):
        text = axes.shortened(series.label, _WIDTH - _SWATCH - 24, 11.5)
        width = _SWATCH + axes.text_width(text, 11.5) + 12
        if x > 8 and x + width > _WIDTH:
            x, y = 8.0, y + _LEGEND_ROW
        shapes.append(marks.swatch(chart, series, style, x, y))
        shapes.append(
            f'<text class="key" x="{x + _SWATCH:g}" y="{y + 4:g}">{escaped(text)}'
            "</text>"
        )
        x += width
    return shapes, y + 24


def _horizontal_lines(frame: Frame) -> list[str]:
    shapes = []
    for tick in frame.y.ticks:
        y = frame.y.place(tick)
        strong = " base" if tick in (0, frame.y.first) else ""
        shapes.append(
            f'<line class="grid{strong}" x1="{frame.x.start - 8:g}" '
            f'x2="{frame.width - _RIGHT:g}" y1="{y:g}" y2="{y:g}"/>'
            f'<text class="tick" x="{frame.x.start - 14:g}" y="{y + 4:g}" '
            f'text-anchor="end">{tick_text(tick)}</text>'
        )
    return shapes


def _x_ticks(frame: Frame) -> list[str]:
    shapes = []
    bottom = frame.y.start
    free = -math.inf
    for tick in frame.x.ticks:
        x, text = frame.x.place(tick), tick_text(tick)
        shapes.append(
            f'<line class="grid base" x1="{x:g}" x2="{x:g}" y1="{bottom:g}" '
            f'y2="{bottom + 5:g}"/>'
        )
        # A number that would touch the one before is left out.
        half = axes.text_width(text, 11.5) / 2
        if x - half > free:
            shapes.append(
                f'<text class="tick" x="{x:g}" y="{bottom + 19:g}" '
                f'text-anchor="middle">{text}</text>'
            )
            free = x + half + 3
    return shapes


def _category_names(chart: Chart, frame: Frame) -> list[str]:
    slope = sloping(chart, frame.x.end - frame.x.start)
    shapes = []
    for index, name in enumerate(_categories(chart)):
        x, y = frame.x.place(index), frame.y.start
        place = (
            f'transform="translate({x + 4:g} {y + 14:g}) rotate(-35)" text-anchor="end"'
            if slope
            else f'x="{x:g}" y="{y + 19:g}" text-anchor="middle"'
        )
        shapes.append(
            f'<text class="tick" {place}>{escaped(_short(name))}'
            f"<title>{escaped(name)}</title></text>"
        )
    return shapes


def _axis_names(chart: Chart, frame: Frame) -> list[str]:
    across = (frame.x.start + frame.x.end) / 2
    up = (frame.y.start + frame.y.end) / 2
    x_label = axes.shortened(chart.x_label, 2 * min(across, frame.width - across))
    y_label = axes.shortened(chart.y_label, frame.height)
    half = axes.text_width(y_label) / 2
    up = min(max(up, half + 2), frame.height - half - 2)
    return [
        f'<text class="axis" x="{across:g}" y="{frame.height - 6:g}" '
        f'text-anchor="middle">{escaped(x_label)}</text>',
        f'<text class="axis" transform="translate(13 {up:g}) rotate(-90)" '
        f'text-anchor="middle">{escaped(y_label)}</text>',
    ]


def _point_names(chart: Chart, frame: Frame) -> list[str]:
    if chart.kind == BARS:
        return []
    points = [
        (frame.x.place(x), frame.y.place(y), axes.shortened(name, 120, labels.SIZE))
        for series in chart.series
        for x, y, name in zip(series.x, series.y, _names(series), strict=True)
    ]
    return [
        f'<text class="label" x="{label.x:g}" y="{label.y:g}" '
        f'text-anchor="{label.anchor}">{escaped(label.text)}</text>'
        for label in labels.place(points, frame.box)
    ]


def _names(series: Series) -> list[str]:
    return series.names or [""] * len(series.x)
