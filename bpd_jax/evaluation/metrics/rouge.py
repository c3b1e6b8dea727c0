"""ROUGE of summaries, by the package `rouge-score`.

Lin 2004. The package is Google's port of the original script; with its stemmer (Porter)
it equals that script's option `-m`, by which the literature reports.
"""

import functools
from collections.abc import Sequence
from typing import Any

from bpd_jax.errors import UserError

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UserError(
            f"ROUGE needs the package rouge-score, which cannot be imported ({error}): "
            "pip install 'rouge-score>=0.1.2,<0.2'."
        ) from error
    return RougeScorer(KINDS, use_stemmer=True)


def scores(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """F-measures `rouge1`, `rouge2`, `rougeL` and `rougeLsum`, in 0 … 1.

    `rougeL` is that of the longest common subsequence of both texts as they stand (the
    paper's); `rougeLsum` takes each line for a sentence and unites the subsequences.

    Args:
      prediction: the summary that was written.
      references: right summaries, one or more; of each score the best one counts.

    Raises:
      UserError: the package is missing.
    """
    found = _scorer().score_multi(list(references), prediction)
    return {kind: float(found[kind].fmeasure) for kind in KINDS}
