"""The picture of a lattice."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from bpd_jax.reporting import lattice_drawing
from bpd_jax.reporting.records import Candidate, LatticePicture, Path

POSITIONS = [
    [Candidate(" a", math.log(0.9))],
    [Candidate("b", math.log(0.6)), Candidate("<c&", math.log(0.3))],
    [Candidate("d", math.log(0.5)), Candidate("e", math.log(0.001))],
]
PATHS = [Path("BPD", [0, 0, 0], 1), Path("n-gram", [0, 1, 0], 2)]


def drawn(paths=PATHS):
    lattice = LatticePicture("x =", POSITIONS, paths, [" a", "<c&", "f"])
    svg = ElementTree.fromstring(lattice_drawing.draw(lattice)).find("./div/svg")
    left, top, width, height = map(float, svg.get("viewBox").split())
    for rect in svg.iter("rect"):
        x, y, w, h = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
        assert left <= x <= x + w <= left + width
        assert top <= y <= y + h <= top + height
    return svg


def test_every_candidate_is_a_node_with_its_probability():
    assert [
        (node.get("class"), *(t.text for t in node.iter("text")))
        for node in drawn().iter("g")
        if node.get("class", "").startswith("node")
    ] == [
        ("node greedy", "·a", "90%"),
        ("node", "b", "60%"),
        ("node greedy", "<c&", "30%"),
        ("node", "d", "50%"),
        ("node", "e", "<1%"),
        ("node greedy outside", "f", "absent"),
    ]


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_accepted_parts_of_paths_are_solid(accepted):
    svg = drawn([Path("BPD", [0, 0, 1], accepted)])
    pieces = {p.get("class"): p.get("d").count("M") for p in svg.iter("path")}
    assert (pieces["path"], pieces["path rejected"]) == (accepted - 1, 3 - accepted)


def test_badges_mark_the_end_of_accepted_tokens():
    badges = [g for g in drawn().iter("g") if g.get("class") == "badge"]
    assert [badge.find("text").text for badge in badges] == ["A", "B"]
    first, second = (float(badge.find("circle").get("cx")) for badge in badges)
    assert first < second
