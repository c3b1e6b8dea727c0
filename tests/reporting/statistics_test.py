"""Figures and bars about drafts on the page."""

import dataclasses
import xml.etree.ElementTree as ElementTree

import pytest

from bpd_jax.reporting import statistics, wording


def rows(report):
    """The table's rows as elements, by their label."""
    html = statistics.section(report).replace("<br>", " ")
    body = ElementTree.fromstring(f"<div>{html}</div>").find(".//tbody")
    return {row.find("th").text: row for row in body}


def test_one_row_per_method_that_drafts(report):
    found = rows(report)
    assert list(found) == [method.label for method in report.methods[1:]]
    for method in report.methods[1:]:
        cells = [cell.text for cell in found[method.label].findall("td")]
        assert tuple(cells[:-1]) == wording.draft_figures(method)


def test_bars_are_the_shares_on_one_scale(report):
    shares = {"bpd": [0.5, 0.3, 0.2], "oracle": [0.0, 0.2, 0.8]}
    methods = [
        dataclasses.replace(method, accepted=shares[method.name])
        for method in report.methods
        if method.name in shares
    ]
    found = rows(dataclasses.replace(report, methods=methods, records=[]))
    for method in methods:
        svg = found[method.label].find(".//svg")
        bars = svg.findall("rect")
        heights = [float(bar.get("height")) for bar in bars]
        top = 37  # that of the share 0.8
        want = [top * share / 0.8 for share in method.accepted]
        assert heights == pytest.approx(want, abs=0.01)
        assert [bar.get("class") for bar in bars] == [None, None, "whole"]
        left, right = float(bars[0].get("x")), float(bars[-1].get("x"))
        assert left == 0 < right < float(svg.get("viewBox").split()[2])
    assert "1: 50.0 %; 2: 30.0 %" in found["BPD"].find(".//svg").get("aria-label")


def test_no_drafts_no_section(report):
    greedy = dataclasses.replace(report, methods=report.methods[:1], records=[])
    assert statistics.section(greedy) == ""
