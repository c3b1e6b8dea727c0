"""The draft viewer's HTML."""

import dataclasses

from bpd_jax.reporting import viewer
from bpd_jax.reporting.records import Step


def with_record(report, **changes):
    record = dataclasses.replace(report.records[1], **changes)
    return dataclasses.replace(report, records=[record])


def test_tokens_are_certain_accepted_or_rejected(report):
    step = Step(["a", "b", "<c", "d"], accepted=2, rank=4)
    html = viewer.drafts(with_record(report, steps=[step]))
    assert (
        '<ins class="certain">a</ins><ins>b</ins><del>&lt;c</del><del>d</del>' in html
    )
    assert "<b>2</b><small> of 4</small>" in html
    assert "<em>draft 5</em>" in html


def test_a_draft_that_is_accepted_as_a_whole(report):
    html = viewer.drafts(with_record(report, steps=[Step(["a", "b"], 2)]))
    assert '<ins class="certain">a</ins><ins>b</ins></span>' in html


def test_white_space_in_tokens_is_visible(report):
    step = Step(["\n  x", "\t", ""], accepted=3)
    html = viewer.drafts(with_record(report, steps=[step]))
    assert "<i>⏎··</i>x</ins>" in html
    assert "<ins>⇥</ins><ins>∅</ins>" in html


def test_text_is_split_by_serial_call(report):
    steps = [Step(["a\n", "<b", "x"], 2), Step(["c", "y"], 1)]
    html = viewer.drafts(with_record(report, text="a\n<bc", steps=steps))
    assert '<mark data-step="1">a\n&lt;b</mark><mark data-step="2">c</mark>' in html


def test_text_stays_whole_where_pieces_do_not_give_it(report):
    html = viewer.drafts(with_record(report, text="é<", steps=[Step(["\ufffd"], 1)]))
    assert "<mark" not in html
    assert "</span>é&lt;</pre>" in html


def test_the_best_recorded_method_is_preset(report):
    assert 'value="ngram_p" checked' in viewer.drafts(report)
    only_bpd = with_record(report)
    assert 'value="bpd" checked' in viewer.drafts(only_bpd)


def test_no_records_no_section(report):
    assert viewer.drafts(dataclasses.replace(report, records=[])) == ""
