"""The page of all studies: complete, escaped and self-contained."""

import base64
import dataclasses
import hashlib
import html.parser
import json
import re

import pytest

from bpd_jax.reporting import cell_text
from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Finding, Row, Table
from bpd_jax.reporting.page import Page, PagePart, render, run_table

VOID = {"meta", "input"}
NASTY = '</script><img src=x onerror=alert(1)><!-- " & \u202e'


class Parsed(html.parser.HTMLParser):
    """Elements, texts and table rows of a page whose elements are all closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.source = text
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self):
        return "".join(self.texts)


@pytest.fixture(scope="module")
def page(paper_report):
    return Parsed(render(paper_report))


def test_page_contains_every_number_of_every_table(paper_report, page):
    for part in paper_report.parts:
        for table in part.exhibit.tables:
            for row in table.rows:
                row_text = row.label
                for cell, column in zip(row.cells, table.columns, strict=True):
                    row_text += cell_text.measured(cell, column)
                    if bounds := cell_text.interval(cell, column):
                        row_text += f" {bounds}"
                    if paper := cell_text.printed(cell, column):
                        row_text += f" paper {paper}"
                assert row_text in page.text
    assert "LAMBADA2.75 2.61–2.91 paper 3.12" in page.text
    assert "not measured paper 1.23" in page.text


def test_page_contains_findings_notes_facts_and_figures(paper_report, page):
    for part in paper_report.parts:
        exhibit = part.exhibit
        for sentence in (part.title, exhibit.question, *exhibit.notes):
            assert sentence in page.text
        for finding in exhibit.findings:
            # In the summary and in its section.
            assert page.text.count(finding.statement) == 2
            assert page.text.count(finding.evidence.replace(" -", " −")) == 2
        for chart in exhibit.charts:
            assert chart.title in page.text
    for figure in paper_report.figures:
        assert f"{figure.name}{figure.value}{figure.note}" in page.text
    assert "python -m experiments.run table4 --size=smollm2 --limit=50" in page.text
    assert "Study.examples = 50" in page.text
    assert "30 layers, 576 / 1536 wide" in page.text
    assert "bpd_jax 0.7.0, jax 0.10.2" in page.text


def test_intervals_and_left_out_contenders_are_explained(paper_report, page):
    assert "95 % bootstrap interval over examples" in page.text
    note = "Left out: neural:1@narrow: there is no model 'narrow'."
    assert page.text.count(note) == 2
    [part, *_] = paper_report.parts
    table = dataclasses.replace(part.exhibit.tables[0], intervals="range of runs")
    exhibit = dataclasses.replace(part.exhibit, tables=[table])
    other = Page("Other", "2025-01-31", [PagePart("table4", exhibit)])
    other_text = Parsed(render(other)).text
    assert "1.40–1.60 range of runs" in other_text
    assert "bootstrap interval over" not in other_text


def test_links_resolve_and_ids_are_unique(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {a["href"] for tag, a in page.elements if tag == "a"}
    assert {"#summary", "#table4", "#figure6_tiny", "#explorer-title"} <= links
    assert {link.removeprefix("#") for link in links} <= set(ids)
    for _, attributes in page.elements:
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in ids
        if attributes.get("tabindex") == "0":
            assert "aria-label" in attributes or "aria-labelledby" in attributes


def test_markup_in_text_is_escaped(paper_report):
    table = Table(
        NASTY, NASTY, NASTY,
        [Column(NASTY, NASTY, unit=NASTY)],
        [Row(NASTY, [Cell(1.0, text=NASTY)])],
        NASTY,
    )  # fmt: skip
    facts = {NASTY: NASTY, "model": NASTY, "gin": f"{NASTY}\n{NASTY}"}
    finding = Finding(NASTY, True, NASTY)
    exhibit = Exhibit(
        "table4", NASTY, NASTY, NASTY, [table], [], [], [finding], [NASTY], facts
    )
    explored = dataclasses.replace(
        paper_report.texts[0], key=NASTY, group=NASTY, title=NASTY, prompt=NASTY
    )
    report = Page(NASTY, NASTY, [PagePart("table4", exhibit, NASTY)], texts=[explored])
    text = render(report)
    assert text.count("<script") == text.count("</script") == 2
    assert "<img" not in text
    assert "<!--" not in text
    assert "\u202e" not in text
    assert NASTY[:-1] in Parsed(text).text


def test_data_of_the_explorer_round_trip(paper_report, page):
    pattern = r'<script type="application/json"[^>]*>(.*?)</script>'
    data = re.search(pattern, page.source)[1]
    assert not set("<>&") & set(data)
    for expected, parsed in zip(paper_report.texts, json.loads(data), strict=True):
        for field in ("key", "output", "candidates", "traces"):
            assert parsed[field] == getattr(expected, field)
        # Invisible characters are escaped.
        pieces = [piece.replace("\u202e", "\\u202e") for piece in expected.pieces]
        assert parsed["pieces"] == pieces


def test_the_page_runs_only_its_script_and_has_no_external_references(page):
    text = page.source
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [
        a["content"] for _, a in page.elements
        if a.get("http-equiv") == "Content-Security-Policy"
    ]  # fmt: skip
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}'" in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write", script)
    without_namespace = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|url\(|@import", without_namespace)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "onclick", "onload"} & attributes.keys()


SETTINGS = {"max_new_tokens": 64, "lattice_width": 16, "rounds": 3}


def run(title, counts, **facts):
    examples = {task: {"report": n, "tune": m} for task, (n, m) in counts.items()}
    facts = {"size": "smollm2", "model": "smollm2", "settings": SETTINGS, **facts}
    return Exhibit(title, title, "", "", facts={**facts, "examples": examples})


def rows_of(*exhibits):
    return [
        (row.label, row.cells[0].text, [cell.value for cell in row.cells[4:]])
        for row in run_table(exhibits).rows
    ]


def test_studies_with_equal_settings_share_a_row():
    block = {**SETTINGS, "source": "block"}
    rows = rows_of(
        run("Table 8", {"squad": (24, 12)}),
        run("Table 4", {"squad": (24, 12), "rag": (15, 12)}),
        run("Table E", {"rag": (3, 0)}, settings={"longest_prompt": 32}),
        run("Table 5", {"rag": (9, 12)}),
        run("Table 3", {"rag": (15, 12)}, heads=7, settings=block),
        run("Table 4", {"squad": (2, 0)}, size="tiny", heads=3),
    )
    assert rows == [
        ("smollm2", "2", [None, 39, 24, 2, 64, None, None, 16]),
        ("smollm2", "Table E", [None, 3, 0, 1, None, 32, None, None]),
        ("smollm2", "Table 5", [None, 9, 12, 1, 64, None, None, 16]),
        ("smollm2", "Table 3", [7, 15, 12, 1, 64, None, None, 16]),
        ("tiny", "1", [3, 2, 0, 1, 64, None, None, 16]),
    ]
