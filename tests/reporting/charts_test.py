"""Charts: positions and styles of marks, bounds of the drawing, axes and labels."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from bpd_jax.reporting import axes, charts, marks
from bpd_jax.reporting.axes import Axis
from bpd_jax.reporting.exhibits import BARS, LINES, POINTS, Chart, Series
from bpd_jax.reporting.marks import Box

TASKS = ["SQuAD", "Retrieval-augmented generation & <more>"]


def chart(kind, *series, **fields):
    return Chart("name", "A title", kind, "heads", "efficiency", [*series], **fields)


def drawn(kind, *series, **fields):
    return ElementTree.fromstring(charts.draw(chart(kind, *series, **fields)))


def elements_of_class(svg, style):
    return [e for e in svg.iter() if style in (e.get("class") or "").split()]


def corners(element):
    return [tuple(map(float, c.split(","))) for c in element.get("points").split()]


def test_points_are_at_the_position_of_their_values():
    svg = drawn(LINES, Series("BPD", [3, 6, 9], [1.0, 1.5, 2.0]))
    ticks = [t.attrib | {"text": t.text} for t in elements_of_class(svg, "tick")]
    rows = {t["text"]: float(t["y"]) - 4 for t in ticks if t["text-anchor"] == "end"}
    columns = {t["text"]: float(t["x"]) for t in ticks if t["text-anchor"] == "middle"}
    [line] = elements_of_class(svg, "line")
    first, middle, last = corners(line)
    assert first == pytest.approx((columns["3"], rows["1"]))
    assert last == pytest.approx((columns["9"], rows["2"]))
    # Half-way between both, in both directions.
    half = [(a + b) / 2 for a, b in zip(first, last, strict=True)]
    assert middle == pytest.approx(half, abs=0.01)
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in svg.iter("circle")]
    assert circles == [first, middle, last]


def test_bars_start_at_zero_and_go_both_ways():
    svg = drawn(
        BARS,
        Series("ours", [0, 1], [10, -5], [8, -7], [12, -3]),
        Series("ours, paper", [0, 1], [20, 5], dashed=True),
        categories=TASKS,
    )
    bars = elements_of_class(svg, "bar-mark")[2:]  # after those of the legend
    tops = [float(bar.get("y")) for bar in bars]
    heights = [float(bar.get("height")) for bar in bars]
    zero = tops[0] + heights[0]
    assert tops[1] == pytest.approx(zero, abs=0.01)
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.02)
    assert heights[2] == pytest.approx(2 * heights[0], abs=0.02)
    assert ["hollow" in bar.get("class") for bar in bars] == [False] * 2 + [True] * 2
    assert len(elements_of_class(svg, "whisker")) == 2
    titles = [bar.find("title").text for bar in bars]
    assert titles[0] == "ours, SQuAD: 10 (8 to 12)"
    assert titles[1] == f"ours, {TASKS[1]}: −5 (−7 to −3)"


def test_names_and_a_fitted_line():
    svg = drawn(
        POINTS,
        Series("tasks", [1, 2], [1, 2], names=["<b>", "SQuAD"]),
        Series("R = 0.97", [1, 2], [1, 2], dashed=True),
    )
    assert {text.text for text in elements_of_class(svg, "label")} == {"<b>", "SQuAD"}
    legend, line = elements_of_class(svg, "dashed")
    assert (legend.tag, line.tag) == ("path", "polyline")
    keys = [text.text for text in elements_of_class(svg, "key")]
    assert keys == ["tasks", "R = 0.97"]


@pytest.mark.parametrize("kind", [LINES, POINTS, BARS])
def test_all_marks_are_inside_the_drawing(kind):
    names = [f"A rather long name, number {index}" for index in range(12)]
    series = [
        Series(name, list(range(12)), [1e5 * (i - 6) for i in range(12)], names=names)
        for name in names[:6]
    ]
    svg = drawn(kind, *series, categories=names)
    width, height = map(float, svg.get("viewBox").split()[2:])
    for element in svg.iter():
        for name, limit in (("x", width), ("cx", width), ("y", height), ("cy", height)):
            assert 0 <= float(element.get(name, 0)) <= limit
        if element.get("points"):
            for x, y in corners(element):
                assert 0 <= x <= width
                assert 0 <= y <= height


def test_a_separate_file_is_self_contained():
    text = charts.standalone(chart(LINES, Series("a & b", [1, 2], [1, 2], dashed=True)))
    svg = ElementTree.fromstring(text)
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in text
    assert re.search(r"stroke:#[0-9a-f]{6}", text)
    assert "A title" in "".join(svg.itertext())
    assert not re.search(r"@media|url\(|@import", text)


@pytest.mark.parametrize("low, high", [(0, 3000), (-3, 1e-4), (7, 7), (0.1, 0.3)])
def test_ticks_are_round_and_cover_the_data(low, high):
    ticks = axes.ticks(low, high)
    assert ticks[0] <= low <= high <= ticks[-1]
    assert 2 <= len(ticks) <= 8


def test_few_integers_are_ticks():
    assert axes.ticks_inside([9, 3, 6, 3]) == [3, 6, 9]
    assert axes.ticks_inside([0.5, 2.25]) == [0.5, 1, 1.5, 2]
    assert axes.log_ticks([1, 2, 4, 8, 16]) == [1, 2, 4, 8, 16]
    assert axes.log_ticks(list(range(3, 130))) == [5, 10, 20, 50, 100]


def test_positions_on_an_axis():
    linear = Axis(2, 4, 100, 20, [])
    assert [linear.position(value) for value in (2, 2.5, 4)] == [100, 80, 20]
    # Equal factors have equal lengths: 4 is half-way from 1 to 16.
    assert Axis(1, 16, 0, 60, [], logarithmic=True).position(4) == 30
    assert Axis(3, 3, 0, 60, []).position(3) == 30


def test_texts_are_shortened_until_they_fit():
    assert axes.shortened("SQuAD", 100) == "SQuAD"
    text = axes.shortened("Retrieval-augmented generation", 90)
    assert text.endswith("…")
    assert text[:-1] in "Retrieval-augmented generation"
    assert axes.text_width(text) <= 90


def test_labels_do_not_overlap_and_unreadable_ones_are_left_out():
    close = [(100, 100, "MultiNews"), (104, 103, "XSum"), (112, 96, "NewsRoom")]
    crowd = [(100 + i % 5, 100 + i // 5, f"Name {i}") for i in range(40)]
    for points, least, most, share in ((close, 3, 3, 0), (crowd, 2, 19, 0.2)):
        placed = marks.place_labels(points, Box(0, 0, 300, 200))
        assert least <= len(placed) <= most
        for first, second in itertools.combinations(placed, 2):
            assert first.box.intersection(second.box) <= share * first.box.area
