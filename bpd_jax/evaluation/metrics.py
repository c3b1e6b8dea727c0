"""Quality of texts: SQuAD's exact match and F1, ROUGE, final numbers of GSM8K.

`metric_of` gives the metric of a task, `estimate` the mean of a score over examples.
"""

import functools
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.evaluation.efficiency import ratio_interval

Metric = Callable[[str, Sequence[str]], dict[str, float]]
"""Scores of a prediction, given reference answers, by name; each in 0 … 1."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")

# In GSM8K (Cobbe et al. 2021) a solution ends with its result after this mark.
_MARK = "####"
# A minus sign after a digit denotes a difference, not a negative number.
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")

_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_UNSTEMMED = ("rougeL", "rougeLsum")
ROUGE_KINDS = (*_KINDS, *(f"{kind}_unstemmed" for kind in _UNSTEMMED))


def normalize(text: str) -> str:
    """Lower-cases a text and removes ASCII punctuation, articles and repeated spaces.

    Punctuation is removed first and leaves no space.

    >>> normalize("The  U.S.A.'s a-bomb")
    'usas abomb'
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_scores(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """`exact_match` and `f1` of an answer, by SQuAD's official script.

    Rajpurkar et al. 2016, section 6.1: punctuation and articles are ignored, and the
    best score over several references counts.
    """
    texts = [normalize(reference) for reference in references]
    predicted = normalize(prediction)
    best = max(_f1(predicted.split(), text.split()) for text in texts)
    return {"exact_match": float(predicted in texts), "f1": best}


def _f1(predicted: list[str], correct: list[str]) -> float:
    """The F1 of words, as multisets; that of two empty texts is 1.

    Worked example: `Paris in France` and `Paris France today` share two words, so
    precision and recall are 2/3 each.
    """
    if not predicted and not correct:
        return 1.0
    shared = (Counter(predicted) & Counter(correct)).total()
    return 2 * shared / (len(predicted) + len(correct))


def final_number(text: str) -> Decimal | None:
    """The first number after the last `####`, or else the last number.

    Models that were not trained on GSM8K's format usually end with the result as well.
    Commas within a number, and currency and percent signs, are ignored.

    >>> final_number("He pays $1,200.50 a year, 10% less.")
    Decimal('10')
    >>> final_number("400 + 800 = 1200 #### 1,200")
    Decimal('1200')
    """
    _, mark, result = text.rpartition(_MARK)
    numbers = _NUMBER.findall(result)[:1] if mark else []
    numbers = numbers or _NUMBER.findall(text)[-1:]
    return Decimal(numbers[0].replace(",", "")) if numbers else None


def number_scores(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """`final_number`: 1 if the final number is that of a reference, else 0."""
    correct = {final_number(reference) for reference in references} - {None}
    return {"final_number": float(final_number(prediction) in correct)}


@functools.cache
def _scorer(*, stemmed: bool) -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UserError(
            f"ROUGE needs the package rouge-score, which cannot be imported ({error}): "
            "pip install 'rouge-score>=0.1.2,<0.2'."
        ) from error
    return RougeScorer(_KINDS if stemmed else _UNSTEMMED, use_stemmer=stemmed)


def rouge_scores(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """F-measures `ROUGE_KINDS` of a summary (Lin 2004), in 0 … 1.

    `rougeL` is computed from the longest common subsequence of the complete texts;
    `rougeLsum` treats each line as a sentence and unites the subsequences. The Porter
    stemmer is customary in the literature; T5's evaluation reports ROUGE-Lsum without
    it. The paper names neither, so both are computed. The best score of each kind over
    the references counts.
    """
    stemmed, whole = (
        _scorer(stemmed=s).score_multi(list(references), prediction)
        for s in (True, False)
    )
    results = {**stemmed, **{f"{kind}_unstemmed": whole[kind] for kind in whole}}
    return {kind: float(results[kind].fmeasure) for kind in ROUGE_KINDS}


_METRICS: dict[str, tuple[Metric, str]] = {
    "squad": (answer_scores, "exact_match"),
    **dict.fromkeys(
        ("cnn_dailymail", "samsum", "multi_news", "xsum", "newsroom", "summarization"),
        (rouge_scores, "rougeL"),
    ),
    **dict.fromkeys(("gsm8k", "math_reasoning"), (number_scores, "final_number")),
    # Spec-Bench has the short answers of Natural Questions. Long answers contain many
    # correct words but never match exactly.
    "rag": (answer_scores, "f1"),
}
"""The metric of each task, and its main score."""

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
      (`passage_scores`); translation, whose metric, BLEU, is computed over all texts;
      and tasks without reference answers.
    """
    return _METRICS[task][0] if task in _METRICS else None


def headline_of(task: str) -> str | None:
    """The main score of a task: that of the paper's Table 1, if it has one."""
    return "perplexity" if task == "lambada" else _METRICS.get(task, (None, None))[1]


class Estimate(NamedTuple):
    """A value and its 95 % bootstrap interval; the interval is None for one example."""

    value: float
    interval: tuple[float, float] | None


def estimate(name: str, scores: Sequence[Mapping[str, float]]) -> Estimate | None:
    """Aggregates one of `SCORE_LABELS` over examples; None if no example has it.

    A perplexity is the exponential of the mean negative log-probability per token;
    other scores are means in percent.
    """
    parts = PERPLEXITIES.get(name, (name,))
    rows = [[row[p] for p in parts] for row in scores if all(p in row for p in parts)]
    if not rows:
        return None
    columns = np.array(rows, float).T
    if name in PERPLEXITIES:
        numerators, denominators, finish = -columns[0], columns[1], math.exp
    else:
        numerators, denominators, finish = 100 * columns[0], np.ones(len(rows)), float
    value = finish(float(numerators.sum()) / float(denominators.sum()))
    if len(rows) == 1:
        return Estimate(value, None)
    low, high = ratio_interval(numerators, denominators)
    return Estimate(value, (finish(low), finish(high)))
