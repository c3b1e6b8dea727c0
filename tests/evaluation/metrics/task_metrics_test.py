"""Tests of the metrics of tasks."""

import pytest

from bpd_jax.evaluation.metrics import final_number, rouge, squad
from bpd_jax.evaluation.metrics.task_metrics import SCORE_LABELS, headline_of, metric_of
from bpd_jax.studies import tasks
from experiments import printed


def test_headlines_are_those_of_the_paper():
    headlines = {task: headline_of(task) for task in printed.TASKS}
    assert headlines == {task: names[0] for task, names in printed.METRICS.items()}


@pytest.mark.parametrize(
    "task, metric, headline",
    [
        ("squad", squad.scores, "exact_match"),
        ("rag", squad.scores, "f1"),
        ("summarization", rouge.scores, "rougeL"),
        ("math_reasoning", final_number.scores, "final_number"),
        ("lambada", None, "perplexity"),
        ("qa", None, None),
        ("mt_bench", None, None),
        ("translation", None, None),
    ],
)
def test_metrics_of_tasks(task, metric, headline):
    assert metric_of(task) is metric
    assert headline_of(task) == headline


def test_every_score_has_a_label():
    pytest.importorskip("rouge_score")
    for task in tasks.TASK_LABELS:
        metric = metric_of(task)
        if metric:
            assert metric("1", ["1"]).keys() <= SCORE_LABELS.keys()
            assert headline_of(task) in metric("1", ["1"])
