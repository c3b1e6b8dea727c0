"""The page: complete, escaped, and without anything from outside."""

import base64
import dataclasses
import hashlib
import html.parser
import re

import pytest

from bpd_jax.errors import UserError
from bpd_jax.reporting import wording
from bpd_jax.reporting.html import render, write_html
from bpd_jax.reporting.records import Report, Step

VOID = {"meta", "link", "br", "input", "img", "hr"}


class Page(html.parser.HTMLParser):
    """Collects elements and texts, and checks that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.elements = []
        self.texts = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def of(self, tag, **wanted):
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and wanted.items() <= attributes.items()
        ]

    def text(self, *, without=("style", "script")):
        return "".join(data for tag, data in self.texts if tag not in without)


@pytest.fixture(scope="module")
def page(report):
    return Page(render(report))


def test_page_shows_every_number_of_the_table(report, page):
    text = page.text().replace("\u00a0", " ")
    assert wording.summary_sentence(report) in text
    for method in report.methods:
        assert method.label in text
        assert f"{method.block_efficiency:.2f}{wording.interval(method)}" in text
        assert wording.percent(method.gain) in text


def test_page_explains_its_numbers_and_setting(report, page):
    text = page.text()
    for words in [*wording.DEFINITIONS, *wording.DEFINITIONS.values(), *report.notes]:
        assert words in text
    for facts in (report.model, report.settings, report.versions):
        for name, value in facts.items():
            assert f"{name}{wording.fact(value)}" in text


def test_every_record_is_there_and_the_first_prompt_is_visible(report, page):
    articles = page.of("article")
    assert len(articles) == len(report.records)
    for article in articles:
        assert ("hidden" in article) == (article["data-prompt"] != "0")


def test_dangerous_text_is_text(report):
    nasty = "</script><script>alert('x')</script><!-- \" & \x00"
    record = dataclasses.replace(
        report.records[0],
        prompt=nasty,
        text=nasty,
        steps=[Step([nasty], 1), Step(["ok", nasty], 1)],
    )
    methods = [dataclasses.replace(m, label=nasty, note=nasty) for m in report.methods]
    lattice = dataclasses.replace(
        report.lattice,
        prompt_tail=nasty,
        greedy=[nasty],
        paths=[dataclasses.replace(report.lattice.paths[0], label=nasty)],
    )
    text = render(
        Report(
            title=nasty,
            created=nasty,
            task=nasty,
            device=nasty,
            methods=methods,
            records=[record],
            lattice=lattice,
            settings={nasty: nasty},
            notes=[nasty],
        )
    )
    assert text.count("<script") == text.count("</script") == 1
    assert "<!--" not in text
    assert "\x00" not in text
    assert "alert('x')" in Page(text).text()


def test_page_refers_to_nothing_outside(report):
    text = render(report)
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import", text)
    page = Page(text)
    for tag in ("link", "img", "iframe", "object", "base"):
        assert page.of(tag) == []
    for _, attributes in page.elements:
        assert not {"src", "href", "onclick", "onload"} & attributes.keys()


def test_policy_allows_this_script_alone(report):
    text = render(report)
    script = text[text.rindex("<script>") + len("<script>") : text.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = Page(text).of("meta", **{"http-equiv": "Content-Security-Policy"})
    assert "default-src 'none'; " in policy[0]["content"]
    assert f"script-src 'sha256-{digest}'" in policy[0]["content"]


def test_structure_is_accessible(page):
    assert len(page.of("h1")) == 1
    identifiers = [a["id"] for _, a in page.elements if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    for _, attributes in page.elements:
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in identifiers
    # Whatever scrolls can be reached by keyboard and has a name.
    for _, attributes in page.elements:
        if attributes.get("tabindex") == "0":
            assert "aria-label" in attributes or "aria-labelledby" in attributes
    for svg in page.of("svg"):
        assert svg.get("aria-hidden") == "true" or svg["aria-label"]


def test_an_empty_report_is_a_page(report):
    empty = Report("Nothing yet", "2025-01-31", "", "", [])
    page = Page(render(empty))
    assert "No method was measured." in page.text()
    assert page.of("article") == page.of("svg") == page.of("form") == []


def test_write_replaces_the_file_as_a_whole(report, tmp_path):
    path = tmp_path / "folder" / "report.html"
    write_html(report, path)
    assert path.read_text(encoding="utf-8") == render(report)
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_a_path_that_cannot_be_written_is_named(report, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_html(report, tmp_path / "file" / "report.html")
