"""Numbers and sentences that the terminal and the page share."""

import dataclasses

import pytest

from bpd_jax.reporting import wording


def changed(report, name, **changes):
    """The report with one method changed."""
    methods = [
        dataclasses.replace(method, **changes) if method.name == name else method
        for method in report.methods
    ]
    return dataclasses.replace(report, methods=methods)


@pytest.mark.parametrize(
    "piece, shown",
    [
        ("def", "def"),
        (" x\n\t", " x⏎⇥"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\u202eabc", "\\u202eabc"),
        ("\udc80", "\\udc80"),
        ("é漢", "é漢"),
    ],
)
def test_visible_pieces_have_one_line_and_no_control_characters(piece, shown):
    assert wording.visible(piece) == shown


def test_readable_text_keeps_its_lines():
    assert wording.readable("a\n\tb\r\x00") == "a\n\tb\\r\\x00"


def test_numbers():
    assert wording.percent(0.1234) == "+12.3 %"
    assert wording.percent(-0.05) == "−5.0 %"
    assert wording.percent(0.5, sign=False) == "50.0 %"
    assert wording.percent(None) == "—"
    assert wording.seconds(1.0) == "1.00"
    assert wording.seconds(12345.6) == "12,346"
    assert [wording.fact(v) for v in (True, None, 12_000, 16, 0.9, [2, 4])] == [
        "yes",
        "—",
        "12,000",
        "16",
        "0.9",
        "2, 4",
    ]


def test_the_oracle_is_never_the_best_method(report):
    best = wording.best_method(report)
    assert best is not None
    assert best.name == "ngram_p"
    assert max(m.block_efficiency for m in report.methods) > best.block_efficiency


def test_summary_of_lossless_methods(report):
    report = changed(report, "ngram_p", block_efficiency=2.5, gain=0.12)
    assert wording.summary_sentence(report) == (
        "16-best 4-gram: 2.50 tokens per serial call, 12.0 % above BPD; outputs "
        "identical for all methods."
    )


def test_summary_names_methods_that_differ(report):
    report = changed(report, "bpd", differing=3, near_ties=1)
    sentence = wording.summary_sentence(report)
    assert sentence.endswith("outputs DIFFER from greedy decoding for BPD.")


def test_summary_counts_near_ties(report):
    one = changed(report, "bpd", differing=1, near_ties=1)
    assert "identical but for 1 near-tie." in wording.summary_sentence(one)
    more = changed(one, "ngram_p", differing=2, near_ties=2)
    assert "identical but for 3 near-ties." in wording.summary_sentence(more)


def test_summary_without_methods(report):
    empty = dataclasses.replace(report, methods=[], records=[])
    assert wording.summary_sentence(empty) == "No method was measured."


def test_figures_about_drafts(report):
    bpd = dataclasses.replace(
        report.methods[1],
        gain_interval=(-0.031, 0.2),
        nodes=6.04,
        accepted=[0.125, 0.875],
        repeated=0.5,
        longest_run=1.5,
        entropies=[1.0, 2.0, 3.25],
    )
    assert wording.draft_figures(bpd) == (
        "−3.1 … +20.0 %",
        "6.0",
        "12.5 %",
        "50.0 %",
        "1.50",
        "1.00 … 3.25",
    )
    one_head = dataclasses.replace(bpd, entropies=[1.0], gain_interval=None)
    assert wording.draft_figures(one_head)[0] == "—"
    assert wording.draft_figures(one_head)[-1] == "1.00"
    no_heads = dataclasses.replace(
        bpd, entropies=[], repeated=None, longest_run=None, accepted=[], nodes=None
    )
    assert wording.draft_figures(no_heads)[1:] == ("—",) * 5
    assert len(wording.DRAFT_HEADINGS) == 6


def test_verdicts(report):
    reference, bpd = report.methods[:2]
    assert wording.verdict(reference) == "reference"
    assert wording.verdict(bpd) == "identical ✓"
    ties = dataclasses.replace(bpd, differing=2, near_ties=2)
    assert wording.verdict(ties) == "2 near-ties"
    wrong = dataclasses.replace(bpd, differing=3, near_ties=2)
    assert wording.verdict(wrong) == "1 DIFFERENT"
