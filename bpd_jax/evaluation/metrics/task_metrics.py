"""The quality metric of each task."""

from collections.abc import Callable, Sequence

from bpd_jax.evaluation.metrics import final_number, rouge, squad

Metric = Callable[[str, Sequence[str]], dict[str, float]]
"""Scores of a prediction, given reference answers, by name; each in 0 … 1."""

_METRICS: dict[str, Metric] = {
    "squad": squad.scores,
    "cnn_dailymail": rouge.scores,
    "samsum": rouge.scores,
    "multi_news": rouge.scores,
    "xsum": rouge.scores,
    "newsroom": rouge.scores,
    "gsm8k": final_number.scores,
    # Categories of Spec-Bench. The answers of `rag` are the short answers of Natural
    # Questions, which are compared by SQuAD's rules.
    "summarization": rouge.scores,
    "rag": squad.scores,
    "math_reasoning": final_number.scores,
}

# `rag` uses F1: long answers contain many correct words but never match exactly.
_HEADLINES = {"lambada": "perplexity", "squad": "exact_match", "rag": "f1"}

SCORE_LABELS = {
    "perplexity": "Perplexity",
    "last_word_perplexity": "Perplexity of last words",
    "last_word": "Last words right",
    "exact_match": "Exact match",
    "f1": "F1",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "rougeLsum": "ROUGE-Lsum",
    "rougeL_unstemmed": "ROUGE-L, not stemmed",
    "rougeLsum_unstemmed": "ROUGE-Lsum, not stemmed",
    "final_number": "Final number right",
}
"""Display names of the scores."""

PERPLEXITIES = {
    "perplexity": ("log_prob", "tokens"),
    "last_word_perplexity": ("last_word_log_prob", "last_word_tokens"),
}
"""Names of the log-probability sum and of the token count of each perplexity."""


def metric_of(task: str) -> Metric | None:
    """The metric of a task's texts.

    Returns:
      None for a task without one: LAMBADA, whose passages are scored and not generated
      (`lambada.passage_scores`); translation, whose metric, BLEU, is computed over all
      texts; and tasks without reference answers.
    """
    return _METRICS.get(task)


def headline_of(task: str) -> str | None:
    """The main score of a task: that of the paper's Table 1, if it has one."""
    if task in _HEADLINES:
        return _HEADLINES[task]
    usual: dict[Metric, str] = {
        rouge.scores: "rougeL",
        final_number.scores: "final_number",
    }
    metric = metric_of(task)
    return usual[metric] if metric else None
