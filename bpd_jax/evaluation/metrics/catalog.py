"""Which score says how good the texts of a task are."""

from collections.abc import Callable, Sequence

from bpd_jax.evaluation.metrics import numbers, rouge, squad

Metric = Callable[[str, Sequence[str]], dict[str, float]]
"""Scores by name, in 0 … 1, of a prediction against right answers."""

_METRICS: dict[str, Metric] = {
    "squad": squad.scores,
    "cnn_dailymail": rouge.scores,
    "samsum": rouge.scores,
    "multi_news": rouge.scores,
    "xsum": rouge.scores,
    "newsroom": rouge.scores,
    "gsm8k": numbers.scores,
    # Categories of Spec-Bench. The short answers of its `rag` are those of Natural
    # Questions, which are compared by SQuAD's rules.
    "summarization": rouge.scores,
    "rag": squad.scores,
    "math_reasoning": numbers.scores,
}

# Long answers hold many right words, and are never the right one.
_HEADLINES = {"lambada": "perplexity", "squad": "exact_match", "rag": "f1"}

LABELS = {
    "perplexity": "Perplexity",
    "last_word_perplexity": "Perplexity of last words",
    "last_word": "Last words right",
    "exact_match": "Exact match",
    "f1": "F1",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "rougeLsum": "ROUGE-Lsum",
    "final_number": "Final number right",
}
"""What people read, by name of a score."""

PERPLEXITIES = {
    "perplexity": ("log_prob", "tokens"),
    "last_word_perplexity": ("last_word_log_prob", "last_word_tokens"),
}
"""Scores that are perplexities: sums of which log-probabilities, over which tokens."""


def metric_of(task: str) -> Metric | None:
    """The metric of a task's texts.

    Returns:
      None for a task that has none: LAMBADA, whose passages are scored and not
      written (`lambada.passage_scores`); translation, which is measured by BLEU over
      all texts; and tasks without one right answer.
    """
    return _METRICS.get(task)


def headline_of(task: str) -> str | None:
    """The score that stands for a task: the paper's (Table 1), where it has one."""
    if task in _HEADLINES:
        return _HEADLINES[task]
    usual: dict[Metric, str] = {rouge.scores: "rougeL", numbers.scores: "final_number"}
    metric = metric_of(task)
    return usual[metric] if metric else None
