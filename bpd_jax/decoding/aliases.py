"""Aliases: the names that the paper and Medusa give to methods.

An alias is a function that returns a `Method`. In the text of a method, the number
after its name is the argument, and the settings are keywords: `ngram:16:k=8` is
`ngram(16, k=8)`. Settings are those of the parts; `lookup` adds prompt lookup, and
`search` chooses another search.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import fields_of
from bpd_jax.decoding.methods import Method
from bpd_jax.drafting.parts import RefinerPart, find_part

# The searches by the values of the setting `search`.
_SEARCHES = {
    "exact": "best",
    "greedy": "greedy",
    "beam": "beam",
    "best": "tree",
    "static": "static",
    "cover": "cover",
}


def greedy(**settings: Any) -> Method:
    """Plain decoding."""
    return _composed("none", None, settings)


def bpd(**settings: Any) -> Method:
    """Blockwise parallel decoding: the best token of every head."""
    return _composed("heads", "greedy", settings)


def zero_gram(drafts: int = 1, **settings: Any) -> Method:
    """The best drafts under the heads alone."""
    return _composed("heads", "best", settings, number=drafts)


def ngram(drafts: int = 1, **settings: Any) -> Method:
    """The paper's global rescoring: an n-gram model."""
    return _composed("heads", "best", settings, ["ngram"], drafts)


def ngram_device(drafts: int = 1, **settings: Any) -> Method:
    """`ngram` by a search in the decode loop."""
    return ngram(drafts, **{**settings, "engine": "device"})


def ngram_viterbi(drafts: int = 1, **settings: Any) -> Method:
    """`ngram` by a search on the host."""
    return ngram(drafts, **{**settings, "engine": "viterbi"})


def ngram_fst(drafts: int = 1, **settings: Any) -> Method:
    """`ngram` by OpenFst, as in the paper."""
    return ngram(drafts, **{**settings, "engine": "fst"})


def neural(drafts: int = 1, **settings: Any) -> Method:
    """The paper's local rescoring: a small language model."""
    return _composed("heads", "best", settings, ["neural"], drafts)


def neural_ngram(drafts: int = 1, *, beta: Any = None, **settings: Any) -> Method:
    """Both refiners of the paper; `beta` is the weight of the n-gram model."""
    refiners = [find_part("ngram")(beta), "neural"]
    return _composed("heads", "best", settings, refiners, drafts)


def markov(drafts: int = 1, **settings: Any) -> Method:
    """A trained Markov head."""
    return _composed("heads", "best", settings, ["markov"], drafts)


def medusa(nodes: int = 32, **settings: Any) -> Method:
    """Medusa's tree."""
    return _composed("heads", "static", settings, number=nodes)


def medusa_ngram(nodes: int = 32, **settings: Any) -> Method:
    """Medusa's tree, refined by an n-gram model."""
    return _composed("heads", "static", settings, ["ngram"], nodes)


def medusa_neural(nodes: int = 32, **settings: Any) -> Method:
    """Medusa's tree, refined by a small language model."""
    return _composed("heads", "static", settings, ["neural"], nodes)


def prompt_lookup(tokens: int = 8, **settings: Any) -> Method:
    """Copies from the text so far."""
    return _composed("lookup", None, settings, number=tokens)


def lookahead(window: int = 8, **settings: Any) -> Method:
    """n-grams from parallel Jacobi iterations."""
    return _composed("lookahead", None, settings, number=window)


def draft_model(
    tokens: int = 5, *, drafts: int = 1, search: str = "static", **settings: Any
) -> Method:
    """A smaller model, which drafts `tokens` tokens."""
    chains = find_part("chains")(drafts)
    count, kind = chains.paths, _SEARCHES.get(search)
    if kind in ("static", "tree"):
        source = _made("draft_model", settings, tokens)
        if kind == "static":
            return Method(source, [], chains)
        return Method(source, [], find_part("tree")(1 + count * source.tokens))
    rest = {**settings, "tokens": tokens, "search": search}
    return _composed("draft_model", "best", rest, number=count)


def oracle(**settings: Any) -> Method:
    """The upper bound of any choice among the candidates of the heads."""
    return _composed("heads", "oracle", settings)


ALIASES: dict[str, Callable[..., Method]] = {
    alias.__name__: alias
    for alias in (
        *(greedy, bpd, zero_gram, ngram, ngram_device, ngram_viterbi, ngram_fst),
        *(neural, neural_ngram, markov, medusa, medusa_ngram),
        *(medusa_neural, prompt_lookup, lookahead, draft_model, oracle),
    )
}


def _composed(
    source: str,
    search: str | None,
    settings: Mapping[str, Any],
    refiners: Sequence[str | RefinerPart] = (),
    number: int | None = None,
) -> Method:
    """Composes a method and gives each setting to the part that has it.

    Args:
      search: the name of the search, unless the setting `search` chooses another one.
      settings: the settings; of several refiners they are those of the last one.
      refiners: names of refiners, or refiners that are complete.
      number: the number of the search, or else of the source.
    """
    rest = dict(settings)
    if search is None:
        return Method(_made(source, rest, number))
    chosen, copied = rest.pop("search", None), rest.pop("lookup", None)
    name = _SEARCHES.get(chosen, search)
    if chosen is not None and chosen not in _SEARCHES:
        listed = ", ".join(_SEARCHES)
        raise UserError(f"search must be one of {listed}, not {chosen!r}.")
    if search == "static" and name not in ("static", "tree"):
        raise UserError("search must be static or best for a tree.")
    if name == "greedy" and number not in (None, 1):
        raise UserError("search=greedy drafts one path: give 1 draft.")
    has_number = find_part(name).number_setting
    last = _made(name, rest, number if has_number else None, leave=True)
    # Of several refiners, the last one has the settings.
    middle = [
        _made(part, rest, leave=True) if isinstance(part, str) else part
        for part in reversed(refiners)
    ]
    lookup = None if copied is None else find_part("lookup")(copied)
    method = Method(_made(source, rest), middle[::-1], last, lookup)
    if chosen == "exact" and not method.has_exact_search:
        raise UserError(
            "an exact search needs refiners with finitely many states; use search=beam."
        )
    return method


def _made(
    part: str,
    settings: dict[str, Any],
    number: int | None = None,
    *,
    leave: bool = False,
) -> Any:
    """Makes a part, and removes its settings.

    Args:
      settings: settings, possibly of other parts.
      leave: whether other settings may be left.
    """
    kind = find_part(part)
    own = {} if number is None else {kind.number_setting: number}
    for name in fields_of(kind):
        if name in settings and name not in own:
            own[name] = settings.pop(name)
    if settings and not leave:
        listed = " and ".join(settings)
        raise UserError(
            f"its parts do not have the setting {listed}; --method=help lists theirs."
        )
    return kind(**own)
