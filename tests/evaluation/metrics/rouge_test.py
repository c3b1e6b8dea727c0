"""Tests of ROUGE, as the package rouge-score computes it."""

import subprocess
import sys

import pytest

from bpd_jax.evaluation.metrics import rouge


def f_measure(shared, predicted, expected):
    return 2 * shared / (predicted + expected)


def test_scores_of_an_example_computed_by_hand():
    """`police` and `the` stem to themselves, `killed` and `kills` to `kill`.

    prediction  police kills the gunman      4 words, 3 pairs
    reference   the gunman killed police     4 words, 3 pairs

    Shared are all 4 words, the pair `the gunman` alone, and in order at most two words.
    Without the stemmer only `the gunman` is shared in order as well.
    """
    pytest.importorskip("rouge_score")
    scores = rouge.scores("Police kills the gunman.", ["the gunman killed police"])
    assert scores == {
        "rouge1": 1.0,
        "rouge2": pytest.approx(f_measure(1, 3, 3)),
        "rougeL": pytest.approx(f_measure(2, 4, 4)),
        "rougeLsum": pytest.approx(f_measure(2, 4, 4)),
        "rougeL_unstemmed": pytest.approx(f_measure(2, 4, 4)),
        "rougeLsum_unstemmed": pytest.approx(f_measure(2, 4, 4)),
    }
    scores = rouge.scores("police kills", ["police killed"])
    assert (scores["rougeL"], scores["rougeL_unstemmed"]) == (1.0, 0.5)


def test_only_rouge_lsum_splits_lines():
    """Lines in another order share one of two as one sequence, both as sentences."""
    pytest.importorskip("rouge_score")
    scores = rouge.scores("cold rain\nwarm sun", ["warm sun\ncold rain"])
    assert scores["rougeL"] == pytest.approx(f_measure(2, 4, 4))
    assert scores["rougeLsum"] == 1.0


def test_best_score_over_references_is_used():
    pytest.importorskip("rouge_score")
    scores = rouge.scores("warm sun", ["cold rain", "warm rain"])
    assert scores["rouge1"] == pytest.approx(0.5)
    assert rouge.scores("", ["cold rain"]) == dict.fromkeys(rouge.ROUGE_KINDS, 0.0)


def test_missing_package_is_reported():
    program = (
        "import sys; sys.modules['rouge_score'] = None\n"
        "from bpd_jax.base.errors import UserError\n"
        "from bpd_jax.evaluation.metrics import rouge\n"
        "try: rouge.scores('a', ['b'])\n"
        "except UserError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'rouge-score" in result.stdout
