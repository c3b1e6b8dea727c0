"""Pairs of contenders with and without refinement."""

from collections.abc import Sequence

from bpd_jax.decoding.methods import Method
from bpd_jax.studies.study_config import BPD, parse_contender

MEDUSA = "medusa"

REFINES = {
    "ngram": BPD,
    "ngram_device": BPD,
    "ngram_viterbi": BPD,
    "ngram_fst": BPD,
    "neural": BPD,
    "neural_ngram": BPD,
    "markov": BPD,
    "recurrent": BPD,
    "medusa_ngram": MEDUSA,
    "medusa_neural": MEDUSA,
}
"""Kinds of methods that refine drafts, with the kind of the unrefined method."""


def method_of(contender: str) -> Method:
    """The method of a contender.

    >>> method_of("ngram:16@general_2").name
    'ngram:16'
    """
    return parse_contender(contender).method


def unrefined(contender: str, others: Sequence[str]) -> str | None:
    """The contender that drafts in the same way without refinement.

    The counterpart of a tree is the unrefined tree with as many nodes and the same
    search; that of other drafts is BPD. Both use the same number of tokens of prompt
    lookup.

    >>> unrefined("medusa_ngram:8@general_2", ["bpd", "medusa:32", "medusa:8"])
    'medusa:8'
    >>> unrefined("medusa_ngram:8:lookup=8", ["medusa:8", "medusa:8:lookup=8"])
    'medusa:8:lookup=8'

    Args:
      contender: name of a contender.
      others: names of the contenders to choose from.

    Returns:
      None if the contender does not refine, or has no counterpart.
    """
    method = method_of(contender)
    for other in others:
        base = method_of(other)
        if (
            REFINES.get(method.kind) == base.kind
            and all(base.setting(x) == method.setting(x) for x in ("heads", "lookup"))
            and (base.kind == BPD or _tree(base) == _tree(method))
        ):
            return other
    return None


def _tree(method: Method) -> tuple[int, str, int | None]:
    """Number of nodes, search and candidates per head of a Medusa tree."""
    return method.count, method.search_name, method.setting("k")
