"""Exact match and F1 of short answers, by the rules of SQuAD's official script.

Rajpurkar et al. 2016, section 6.1: punctuation and articles do not count, and of
several right answers the nearest one does.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def normalize(text: str) -> str:
    """Lower case without ASCII punctuation, articles, and more than single spaces.

    Punctuation goes without leaving a space, and before articles are looked for.

    >>> normalize("The  U.S.A.'s a-bomb")
    'usas abomb'
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1 if the prediction is one of the right answers once both are normal, else 0."""
    wanted = {normalize(reference) for reference in references}
    return float(normalize(prediction) in wanted)


def f1(prediction: str, references: Sequence[str]) -> float:
    """The best F1 of the prediction's words against those of a right answer.

    Words count as often as they stand there, in any order. Worked example: of `Paris in
    France` and `Paris France today` two words are shared, so precision and recall are
    2/3 each. Nothing against nothing is 1, as in the script of SQuAD 2.0: answers that
    are an article alone are right if they are predicted.
    """
    return max(_f1(prediction, reference) for reference in references)


def _f1(prediction: str, reference: str) -> float:
    found, wanted = normalize(prediction).split(), normalize(reference).split()
    if not found and not wanted:
        return 1.0
    shared = (Counter(found) & Counter(wanted)).total()
    return 2 * shared / (len(found) + len(wanted))


def scores(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """`exact_match` and `f1`, in 0 … 1.

    Args:
      prediction: the answer that was given.
      references: right answers, one or more.
    """
    return {
        "exact_match": exact_match(prediction, references),
        "f1": f1(prediction, references),
    }
