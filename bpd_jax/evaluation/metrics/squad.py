"""Exact match and F1 of short answers, by the rules of SQuAD's official script.

Rajpurkar et al. 2016, section 6.1: punctuation and articles are ignored, and the best
score over several reference answers counts.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def normalize(text: str) -> str:
    """Lower-cases a text and removes ASCII punctuation, articles and repeated spaces.

    Punctuation is removed first and leaves no space.

    >>> normalize("The  U.S.A.'s a-bomb")
    'usas abomb'
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1 if the normalized prediction equals a normalized reference answer, else 0."""
    correct = {normalize(reference) for reference in references}
    return float(normalize(prediction) in correct)


def f1(prediction: str, references: Sequence[str]) -> float:
    """The best F1 of the prediction's words over the reference answers.

    Words are compared as multisets. Worked example: `Paris in France` and `Paris France
    today` share two words, so precision and recall are 2/3 each. Two empty texts have
    F1 = 1, as in the script of SQuAD 2.0: an answer that is only an article is correct
    if it is predicted.
    """
    return max(_f1(prediction, reference) for reference in references)


def _f1(prediction: str, reference: str) -> float:
    predicted, correct = normalize(prediction).split(), normalize(reference).split()
    if not predicted and not correct:
        return 1.0
    shared = (Counter(predicted) & Counter(correct)).total()
    return 2 * shared / (len(predicted) + len(correct))


def scores(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """`exact_match` and `f1`, in 0 … 1.

    Args:
      prediction: a generated answer.
      references: one or more reference answers.
    """
    return {
        "exact_match": exact_match(prediction, references),
        "f1": f1(prediction, references),
    }
