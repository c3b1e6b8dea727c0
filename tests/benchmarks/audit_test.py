"""The numbers of README and docs are those of the records, by code of its own."""

import pytest

from benchmarks import audit


@pytest.mark.parametrize("page", sorted({page for page, _ in audit.lines()}))
def test_numbers_of_pages_are_those_of_the_records(page):
    problems = [audit.check(*line) for line in audit.lines() if line[0] == page]
    assert [problem for problem in problems if problem] == []


@pytest.mark.parametrize(
    "page",
    ["reproduction.md", "tutorials/covering_drafts.md", "tutorials/common_noise.md"],
)
def test_all_measured_numbers_of_pages_are_recomputed(page):
    assert audit.unchecked(f"docs/{page}") == []


def test_another_number_is_found(monkeypatch):
    expression = "be table4 smollm2_heads bpd"
    monkeypatch.setattr(audit, "text_of", lambda page: "BPD yields 1.29 tokens.")
    assert "1.29, but 1.27" in audit.check("page.md", f"yields {{{expression}}} tokens")
    assert "0 times" in audit.check("page.md", f"yielded {{{expression}}} tokens")
    monkeypatch.setattr(audit, "text_of", lambda page: "BPD yields 1.28 tokens.")
    assert audit.check("page.md", f"yields {{{expression}}} tokens") == ""
