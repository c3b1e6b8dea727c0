"""Loss curves."""

import dataclasses
import itertools
import math
import xml.etree.ElementTree as ElementTree

import pytest

from bpd_jax.reporting import curves

ROWS = [
    {"step": 10, "loss": 8.0, "loss_head_1": 3.0, "loss_head_2": 5.0, "rate": 0.1},
    {"step": 20, "loss": math.nan, "loss_head_1": 2.0, "loss_head_2": 4.0},
    {"step": 30, "loss": 5.0, "validation_loss": 6.0, "validation_loss_head_1": 2.5},
]


def test_rows_are_split_into_sums_and_heads():
    total, heads = curves.series_of(ROWS)
    assert total == {"training": [(10, 8.0), (30, 5.0)], "validation": [(30, 6.0)]}
    assert heads == {
        "head 1": [(10, 3.0), (20, 2.0)],
        "head 2": [(10, 5.0), (20, 4.0)],
        "head 1, validation": [(30, 2.5)],
    }


def drawn(series):
    return ElementTree.fromstring(curves.draw("Loss", series))


def test_lower_losses_lie_lower_and_later_steps_further_right():
    svg = drawn({"training": [(0, 4.0), (50, 2.0), (100, 1.0)]})
    points = [
        tuple(map(float, point.split(",")))
        for point in svg.find(".//polyline").get("points").split()
    ]
    assert points == sorted(points)
    assert [y for _, y in points] == sorted(y for _, y in points)


def test_every_line_has_a_name_and_validation_shares_the_colour():
    _, heads = curves.series_of(ROWS)
    svg = drawn(heads)
    names = [t.text for t in svg.iter("text") if t.get("class") == "name"]
    assert names == ["head 1", "head 2"]
    first, second, validation = (g.get("style") for g in svg.iter("g"))
    assert first == validation != second
    dashed = [line.get("class") for line in svg.iter("polyline")]
    assert dashed == ["line", "line", "line validation"]


def test_axes_are_labelled():
    texts = [t.text for t in drawn({"training": [(0, 1.0), (3000, 2.0)]}).iter("text")]
    assert {"training step", "loss (nats)", "1,000", "3,000", "1.2"} <= set(texts)


@pytest.mark.parametrize("count", [1, 2, 8, 40])
def test_names_never_overlap_and_stay_inside(count):
    svg = drawn({f"head {i}": [(0, 5.0), (9, 2.0 + 1e-3 * i)] for i in range(count)})
    heights = sorted(float(t.get("y")) for t in svg.findall(".//text[@class='name']"))
    assert len(heights) == count
    gaps = [high - low for low, high in itertools.pairwise(heights)]
    assert all(gap >= min(16.0, 254 / count) - 1e-6 for gap in gaps)
    assert 0 < heights[0] <= heights[-1] < 310


@pytest.mark.parametrize("points", [[(5, 2.0)], [(5, 0.0)], [(1, 3.0), (2, 3.0)]])
def test_flat_curves_are_drawn(points):
    assert drawn({"training": points}).find(".//polyline").get("points")


def test_long_runs_are_thinned():
    svg = drawn({"training": [(step, 1 / (step + 1)) for step in range(10_001)]})
    assert len(svg.find(".//polyline").get("points").split()) <= 200


def test_no_curves_no_section(report):
    assert curves.section(dataclasses.replace(report, curves=[])) == ""
    assert curves.section(dataclasses.replace(report, curves=[{"step": 1}])) == ""
