"""Scores of texts, computed by hand, and their means over examples."""

import math
import sys
from decimal import Decimal

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.evaluation import metrics
from bpd_jax.evaluation.metrics import (
    SCORE_LABELS,
    estimate,
    headline_of,
    metric_of,
    rouge_scores,
)
from bpd_jax.studies import tasks
from experiments import printed


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("\tan apple,\n a pear and THE theme ", "apple pear and theme"),
        ("The", ""),
        ("Łódź – “the” city", "łódź – “ ” city"),  # only ASCII punctuation is removed
        ("$1,000 (1.5%)", "1000 15"),
    ],
)
def test_answers_are_normalized(text, wanted):
    assert metrics.normalize(text) == wanted


@pytest.mark.parametrize(
    "prediction, references, exact, f1",
    [
        ("the Nobel Prize.", ["Nobel Prize"], 1, 1),
        # 2 of 3 words are right, and 2 of 2 are found: 2 · 2 / (3 + 2).
        ("first Nobel prize", ["Nobel Prize"], 0, 4 / 5),
        # The best reference is used: 1 of 2 and 1 of 1 against 1 of 2 and 1 of 4.
        ("July 1776", ["1776", "the 4th of July of 1776"], 0, 2 / 3),
        # Words are compared as multisets: 2 of 3 and of 2.
        ("ha ha ha", ["ha, ha!"], 0, 4 / 5),
        ("", ["1745"], 0, 0),
        ("the", ["A"], 1, 1),
    ],
)
def test_answers(prediction, references, exact, f1):
    scores = metrics.answer_scores(prediction, references)
    assert scores == {"exact_match": exact, "f1": pytest.approx(f1)}


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("He pays 400*.5=$<<400*.5=200>>200 more.\n#### 1000", "1000"),
        ("#### 1,200\nSo 5 are left.", "1200"),
        ("#### \nThe answer is 7.", "7"),
        ("It costs $1,234,567.50.", "1234567.50"),
        ("That is 10-4", "4"),
        ("It is -4.", "-4"),
        ("one of 1,2,3", "3"),
        ("half: 0.5, or 50%", "50"),
    ],
)
def test_final_number_of_texts(text, wanted):
    assert metrics.final_number(text) == Decimal(wanted)


def test_final_numbers_are_compared_by_value():
    def score(text, reference="2 + 3 = 5\n#### 5"):
        return metrics.number_scores(text, [reference])["final_number"]

    assert (score("So it is $5.00."), score("5 minus 1 is 4")) == (1, 0)
    assert score("none", "I do not know.") == 0


def f_measure(shared, predicted, expected):
    return 2 * shared / (predicted + expected)


def test_rouge_of_an_example():
    """`police` and `the` stem to themselves, `killed` and `kills` to `kill`.

    prediction  police kills the gunman      4 words, 3 pairs
    reference   the gunman killed police     4 words, 3 pairs

    Shared are all 4 words, the pair `the gunman` alone, and in order at most two words.
    Without the stemmer only `the gunman` is shared in order as well. Lines in another
    order share one of two as one sequence, both as sentences.
    """
    pytest.importorskip("rouge_score")
    scores = rouge_scores("Police kills the gunman.", ["the gunman killed police"])
    assert scores == {
        "rouge1": 1.0,
        "rouge2": pytest.approx(f_measure(1, 3, 3)),
        "rougeL": pytest.approx(f_measure(2, 4, 4)),
        "rougeLsum": pytest.approx(f_measure(2, 4, 4)),
        "rougeL_unstemmed": pytest.approx(f_measure(2, 4, 4)),
        "rougeLsum_unstemmed": pytest.approx(f_measure(2, 4, 4)),
    }
    scores = rouge_scores("police kills", ["police killed"])
    assert (scores["rougeL"], scores["rougeL_unstemmed"]) == (1.0, 0.5)
    scores = rouge_scores("cold rain\nwarm sun", ["warm sun\ncold rain", "wind"])
    assert scores["rougeL"] == pytest.approx(f_measure(2, 4, 4))
    assert scores["rougeLsum"] == 1.0


def test_missing_package_is_reported(monkeypatch):
    metrics._scorer.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(UserError, match="pip install 'rouge-score"):
        rouge_scores("a", ["b"])


def test_headlines_are_those_of_the_paper():
    headlines = {task: headline_of(task) for task in printed.TASKS}
    assert headlines == {task: names[0] for task, names in printed.METRICS.items()}
    assert (headline_of("rag"), headline_of("qa")) == ("f1", None)


def test_every_score_has_a_label():
    pytest.importorskip("rouge_score")
    for task in tasks.TASK_LABELS:
        if metric := metric_of(task):
            assert metric("1", ["1"]).keys() <= SCORE_LABELS.keys()
            assert headline_of(task) in metric("1", ["1"])


def test_means_are_in_percent():
    scores = [{"f1": 0.5, "exact_match": 0.0}, {"f1": 1.0}, {"other": 0.2}]
    assert estimate("f1", scores) == (75, (50, 100))
    assert estimate("exact_match", scores) == (0, None)  # no interval for one example
    assert estimate("rouge1", scores) is None


def test_perplexity_weights_tokens():
    """Two tokens of probability 1/2 each and two of 1/8 each: exp(8 ln 2 / 4) = 4."""
    scores = [
        {"log_prob": 3 * math.log(1 / 2), "tokens": 3.0},
        {"log_prob": math.log(1 / 32), "tokens": 1.0},
    ]
    result = estimate("perplexity", scores)
    assert result.value == pytest.approx(4)
    assert result.interval == pytest.approx((2, 32))
