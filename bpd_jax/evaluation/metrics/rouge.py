"""ROUGE of summaries (Lin 2004), by the package `rouge-score`.

The package is Google's port of the original script; its Porter stemmer corresponds to
that script's option `-m`, which is customary in the literature. T5's evaluation, on
which many results on these data sets rest, reports ROUGE-Lsum without the stemmer. The
paper names neither, so scores with and without the stemmer are computed.
"""

import functools
from collections.abc import Sequence
from typing import Any

from bpd_jax.base.errors import UserError

_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_UNSTEMMED = ("rougeL", "rougeLsum")
ROUGE_KINDS = (*_KINDS, *(f"{kind}_unstemmed" for kind in _UNSTEMMED))


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


def scores(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """F-measures `ROUGE_KINDS`, in 0 … 1.

    `rougeL` is computed from the longest common subsequence of the complete texts;
    `rougeLsum` treats each line as a sentence and unites the subsequences.
    `rougeL_unstemmed` and `rougeLsum_unstemmed` compare whole words, the others their
    stems.

    Args:
      prediction: a generated summary.
      references: one or more reference summaries; the best score of each kind counts.

    Raises:
      UserError: the package is missing.
    """
    stemmed, whole = (
        _scorer(stemmed=s).score_multi(list(references), prediction)
        for s in (True, False)
    )
    results = {**stemmed, **{f"{kind}_unstemmed": whole[kind] for kind in whole}}
    return {kind: float(results[kind].fmeasure) for kind in ROUGE_KINDS}
