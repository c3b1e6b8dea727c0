"""ROUGE of summaries (Lin 2004), by the package `rouge-score`.

The package is Google's port of the original script; its Porter stemmer corresponds to
that script's option `-m`, which is customary in the literature.
"""

import functools
from collections.abc import Sequence
from typing import Any

from bpd_jax.base.errors import UserError

ROUGE_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UserError(
            f"ROUGE needs the package rouge-score, which cannot be imported ({error}): "
            "pip install 'rouge-score>=0.1.2,<0.2'."
        ) from error
    return RougeScorer(ROUGE_KINDS, use_stemmer=True)


def scores(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """F-measures `rouge1`, `rouge2`, `rougeL` and `rougeLsum`, in 0 … 1.

    `rougeL` is computed from the longest common subsequence of the complete texts (as
    in the paper); `rougeLsum` treats each line as a sentence and unites the
    subsequences.

    Args:
      prediction: a generated summary.
      references: one or more reference summaries; the best score of each kind counts.

    Raises:
      UserError: the package is missing.
    """
    results = _scorer().score_multi(list(references), prediction)
    return {kind: float(results[kind].fmeasure) for kind in ROUGE_KINDS}
