"""Groups of decoding methods by their parts, and pairs with and without refinement.

Studies decide by the parts of a method and not by its name, because an alias and a
composition may be equal.
"""

from collections.abc import Iterable, Sequence

from bpd_jax.decoding.methods import Method
from bpd_jax.drafting.parts import NODES
from bpd_jax.studies.study_config import BPD, parse_contender

_TRAINED_ASSETS = {"rescorer", "markov"}
# Settings that a method and its counterpart without refinement have in common.
_SHARED = ("heads", "lookup")


def method_of(contender: str) -> Method:
    """The method of a contender.

    >>> method_of("ngram:16@general_2").name
    'ngram:16'
    """
    return parse_contender(contender).method


def with_same_models(
    contender: str, method: Method, others: Iterable[str]
) -> str | None:
    """The contender with another method and the same models, if there is one.

    >>> with_same_models("ngram:1@own", method_of("bpd"), ["bpd", "bpd@own"])
    'bpd@own'
    """
    wanted = method, parse_contender(contender).assets
    parsed = map(parse_contender, others)
    return next((o.name for o in parsed if (o.method, o.assets) == wanted), None)


def of_heads(method: Method, *refiners: str) -> bool:
    """Whether it drafts from the block heads with exactly these refiners.

    >>> of_heads(method_of("medusa_ngram:8"), "ngram")
    True
    """
    return method.source.name == "heads" and method.refiner_names == refiners


def is_bpd(method: Method) -> bool:
    """Whether it drafts the best token of each block head."""
    return of_heads(method) and method.search_name == "greedy"


def bpd_by_heads(contenders: Iterable[str]) -> dict[int | None, str]:
    """The contenders that are BPD, by the number of its first heads; None for all.

    >>> bpd_by_heads(["bpd:heads=3", "heads/greedy", "ngram:1:heads=3"])
    {3: 'bpd:heads=3', None: 'heads/greedy'}
    """
    return {
        contender.method.setting("heads"): contender.name
        for contender in map(parse_contender, contenders)
        if contender.method.without("heads") == method_of(BPD)
        and contender.assets is None
    }


def is_refined(method: Method) -> bool:
    """Whether it refines the drafts of the block heads."""
    return method.source.name == "heads" and bool(method.refiners)


def is_bounded(method: Method, oracle: Method) -> bool:
    """Whether its drafts are paths of the lattice that an oracle chooses from.

    >>> is_bounded(method_of("ngram:16:k=4"), method_of("oracle:k=2"))
    False
    """
    width, most = (m.setting("k") or float("inf") for m in (method, oracle))
    same_source = method.source.name == oracle.source.name
    return method.within_lattice and same_source and width <= most


def is_trained(method: Method) -> bool:
    """Whether its scores are trained; others are counts or those of the heads."""
    return not method.needs.isdisjoint(_TRAINED_ASSETS)


def is_tree(method: Method) -> bool:
    """Whether it drafts a tree with a number of nodes."""
    return method.counts == NODES


def unrefined(contender: str, others: Sequence[str]) -> str | None:
    """The contender that drafts in the same way without refinement.

    The counterpart of a tree is the unrefined tree with as many nodes and the same
    search; that of other drafts is BPD. Both use the same number of tokens of prompt
    lookup.

    >>> unrefined("medusa_ngram:8@general_2", ["bpd", "medusa:32", "medusa:8"])
    'medusa:8'
    >>> unrefined("medusa_ngram:8:lookup=8", ["medusa:8", "medusa:8:lookup=8"])
    'medusa:8:lookup=8'

    Returns:
      None if the contender does not refine, or has no counterpart.
    """
    method = method_of(contender)
    if not is_refined(method):
        return None
    for other in others:
        base = method_of(other)
        if is_tree(method):
            fits = of_heads(base) and is_tree(base) and _tree(base) == _tree(method)
        else:
            fits = is_bpd(base)
        if fits and all(base.setting(x) == method.setting(x) for x in _SHARED):
            return other
    return None


def _tree(method: Method) -> tuple[int, str, int | None]:
    """Number of nodes, search and candidates per head of a tree."""
    return method.count, method.search_name, method.setting("k")
