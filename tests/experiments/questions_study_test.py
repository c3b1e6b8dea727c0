"""The questions of the reviewers, from small records."""

import numpy as np
import pytest

from bpd_jax.studies.study_records import TUNE, EntropyRecord
from experiments.questions.study import _Texts, split_correlation
from tests.experiments.builders import draft, exhibit_of, values_of

# Calls of 8 positions: a text of 1 needs 8, one of 2 needs 4, one of 4 needs 2.
HALF = {1: "11111111", 2: "21212121", 4: "43214321"}


def text(contender, first, second, **fields):
    return draft(contender, "squad", HALF[first] + HALF[second], **fields)


def test_ranks_within_tasks_remove_what_tasks_differ_in():
    # Tasks with a high efficiency gain more, but within each, weak texts gain more.
    efficiency = np.array([[1.0, 2, 3, 4, 11, 12, 13, 14]] * 2)
    ratio = np.array([[4.0, 3, 2, 1, 14, 13, 12, 11]] * 2)
    both = _Texts(efficiency, ratio, np.zeros_like(ratio), np.repeat([0, 1], 4))
    assert split_correlation(both).value > 0.5
    within = split_correlation(both, within=True)
    assert within.value == pytest.approx(-1)
    assert within.interval == pytest.approx((-1, -1))


def findings(records):
    run = {"labels": {record.contender: record.contender for record in records}}
    found = exhibit_of("questions", records, ("squad",), **run).findings
    return {finding.statement: finding for finding in found}


def test_local_rescoring_reads_its_own_tokens():
    records = [
        text(name, factor, factor, example=example)
        for example in range(8)
        for name, factor in (("neural:1", 2), ("neural:1:mode=parallel", 1))
    ]
    statement = (
        "Local rescoring that reads the rescored tokens beats rescoring that reads "
        "the original ones (neural:1)."
    )
    finding = findings(records)[statement]
    assert finding.holds
    assert "+100.0 %" in finding.evidence


def test_the_slope_is_chosen_on_the_tuning_texts():
    methods = {"ngram:1": (1, 2), "ngram:1:slope=0.1": (2, 1)}
    records = [
        text(name, *(factor[part != TUNE],) * 2, example=example, part=part)
        for part in (TUNE, "report")
        for example in range(8)
        for name, factor in methods.items()
    ]
    # The slope wins on the tuning texts and loses on the others.
    (finding,) = [f for s, f in findings(records).items() if "chosen" in s]
    assert finding.holds is False
    assert "−50.0 %" in finding.evidence


def test_drafts_end_before_an_uncertain_head():
    """Calls yield 3 and 1 tokens in turn; where they yield 1, head 2 is uncertain."""
    records = []
    for part, first in ((TUNE, 0), ("report", 10)):
        for example in range(first, first + 6):
            fields = {"example": example, "part": part}
            records.append(draft("bpd", "squad", "3111" * 4, **fields))
            steps = ["8v8v" * 4, "88vv" * 4]  # 8 is 1 nat, v is 31 / 8 nats
            records.append(EntropyRecord("squad", steps=steps, **fields))
    exhibit = exhibit_of("questions", records, ("squad",))
    stopping = next(t for t in exhibit.tables if t.name == "questions_stopping")
    fixed, limit, drafted, tokens, gain = values_of(stopping)["1 token"]
    assert (limit, drafted) == (3.75, 1.0)  # 2 of 0 and of 2 tokens
    # Calls at 0 and 3; with one drafted token at 0, 2 and 3.
    assert (fixed, tokens) == (pytest.approx(4 / 3), 2.0)
    assert gain == pytest.approx(50.0)
    (finding,) = [f for f in exhibit.findings if "uncertain head" in f.statement]
    assert finding.holds
