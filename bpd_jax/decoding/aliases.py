"""Aliases: the names that the paper and Medusa give to compositions of parts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import fields_of
from bpd_jax.drafting.parts import Part, SearchPart, short_text

AUTO = "auto"

# The searches by the values of the setting `search` of aliases.
_SEARCHES = {
    "exact": "best",
    "greedy": "greedy",
    "beam": "beam",
    "best": "tree",
    "static": "static",
}
_SEARCH_VALUES = {search: value for value, search in _SEARCHES.items()}


@dataclasses.dataclass(frozen=True)
class Alias:
    """The definition of an alias.

    Attributes:
      composed: the equivalent composition, with N for the number.
      default: default of its number; None for aliases without a number.
      settings: its settings, in the order in which the use of an alias lists them.
    """

    composed: str
    default: int | None = None
    settings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class AliasUse:
    """The use of an alias in a method.

    Attributes:
      name: name of the alias.
      number: drafts P, nodes M or draft tokens; None for aliases without a number.
      settings: names and values of settings, in the order of the alias.
    """

    name: str
    number: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """The text of the use."""
        words = [self.name] if self.number is None else [self.name, str(self.number)]
        words += [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.settings
        ]
        return ":".join(words)

    def without(self, name: str) -> "AliasUse":
        """Returns the use without one setting."""
        settings = tuple(pair for pair in self.settings if pair[0] != name)
        return dataclasses.replace(self, settings=settings)


def _alias(composed: str, default: int | None = None, settings: str = "") -> Alias:
    return Alias(composed, default, tuple(settings.split()))


_WEIGHTS = "k heads alpha slope"
_NGRAM = f"{_WEIGHTS} search adaptive"
_NEURAL = f"{_WEIGHTS} search mode"
_TRAINED = f"{_WEIGHTS} search normalise lookup"

ALIASES: dict[str, Alias] = {
    "greedy": _alias("none"),
    "bpd": _alias("heads/greedy", None, "heads lookup"),
    "zero_gram": _alias("heads/best:N", 1, "k heads search lookup"),
    "ngram": _alias("heads+ngram/best:N", 1, f"{_NGRAM} normalise lookup"),
    "ngram_device": _alias(
        "heads+ngram/best:N:engine=device", 1, f"{_NGRAM} normalise lookup"
    ),
    "ngram_viterbi": _alias(
        "heads+ngram/best:N:engine=viterbi", 1, f"{_WEIGHTS} lookup"
    ),
    "ngram_fst": _alias("heads+ngram/best:N:engine=fst", 1, "k heads alpha lookup"),
    "neural": _alias("heads+neural/best:N", 1, f"{_NEURAL} normalise lookup"),
    "neural_ngram": _alias(
        "heads+ngram+neural/best:N", 1, f"{_WEIGHTS} beta search normalise lookup"
    ),
    "markov": _alias("heads+markov/best:N", 1, _TRAINED),
    "recurrent": _alias("heads+recurrent/best:N", 1, _TRAINED),
    "medusa": _alias("heads/static:N", 32, "k heads search lookup"),
    "medusa_ngram": _alias("heads+ngram/static:N", 32, f"{_NGRAM} order lookup"),
    "medusa_neural": _alias("heads+neural/static:N", 32, f"{_NEURAL} order lookup"),
    "hydra": _alias("hydra/best:N", 1, "k heads search lookup"),
    "prompt_lookup": _alias("lookup:N", 8, "match"),
    "lookahead": _alias("lookahead:N", 8, "order guesses"),
    "draft_model": _alias("draft_model:N/chains", 5, "k search drafts"),
    "oracle": _alias("heads/oracle", None, "k heads"),
}
"""All aliases except `auto`, which is not a composition."""


def expand(text: str) -> tuple[AliasUse, str]:
    """Translates the use of an alias into a composition of parts.

    >>> expand("ngram:64:search=best:lookup=8")[1]
    'heads+ngram/tree:64+lookup:8'

    Raises:
      UserError: the alias takes no number, or not these settings.
    """
    name, *words = text.split(":")
    alias = ALIASES[name]
    number = alias.default
    if words and "=" not in words[0]:
        number_text = words.pop(0)
        if number is None:
            raise UserError(f"{text!r}: {name} takes no number.")
        if not number_text.isdecimal():
            raise UserError(f"{text!r}: {number_text!r} is not a number.")
        number = int(number_text)
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in alias.settings or key in values:
            raise UserError(
                f"{text!r}: {word!r} is not a setting of {name}, which takes "
                f"{', '.join(alias.settings) or 'none'}, each once and written "
                "NAME=VALUE."
            )
        values[key] = value
    values = {key: values[key] for key in alias.settings if key in values}
    before, slash, _ = alias.composed.partition("/")
    search = _search_of(text, alias, values, number) if slash else ""
    pieces = [*before.replace("N", str(number)).split("+"), search]
    for key, value in values.items():
        if key in ("search", "lookup", "drafts"):
            continue
        if key == "normalise" and search.split(":")[0] in ("tree", "static", "greedy"):
            raise UserError(
                f"{text!r}: {key} changes nothing for trees, which always normalise "
                "scores, and for greedy walks: leave it out."
            )
        at, setting = _place(key, bool(slash))
        pieces[at] += f":{setting}={value}"
    composed = "+".join(pieces[:-1]) + slash + pieces[-1]
    if "lookup" in values:
        composed += f"+lookup:{values['lookup']}"
    settings = tuple((key, _typed(value)) for key, value in values.items())
    return AliasUse(name, number, settings), composed


def _place(key: str, has_search: bool) -> tuple[int, str]:
    """The index of the part that a setting belongs to, and its name there.

    The parts are the source, the refiners, and the search, which may be missing.
    """
    if key in ("alpha", "slope", "adaptive", "mode"):
        return -2, key  # The last refiner.
    if key == "normalise" or (key == "order" and has_search):
        return -1, key
    return (1, "alpha") if key == "beta" else (0, key)


def possible_uses(
    parts: Sequence[Part], search: SearchPart | None, lookup: Part | None
) -> list[str]:
    """The uses of aliases that may be equal to a composition, the shortest first.

    This is the inverse of `expand`, except that the composition may have settings that
    the alias lacks: parse a use to find out whether it is equal.

    Args:
      parts: source and refiners.
      search: the search, if there is one.
      lookup: prompt lookup after another source, if there is one.
    """
    uses = []
    for name, alias in ALIASES.items():
        before, slash, after = alias.composed.partition("/")
        names = [word.partition(":")[0] for word in before.split("+")]
        if names != [part.name for part in parts] or bool(slash) != bool(search):
            continue
        counted = parts[0] if search is None or "N" in before else search
        number = getattr(counted, counted.number_setting, 1)
        values: dict[str, Any] = {}
        if search is not None:
            if search.name != after.partition(":")[0]:
                values["search"] = _SEARCH_VALUES.get(search.name)
            drafts = search.drafts
            if search.name == "tree":
                drafts = (getattr(search, search.number_setting) - 1) // number
            if "drafts" in alias.settings and drafts > 1:
                values["drafts"] = drafts
        pieces = [*parts, search]
        for key in alias.settings:
            at, setting = _place(key, bool(slash))
            field = fields_of(pieces[at]).get(setting) if pieces[at] else None
            if field and (value := getattr(pieces[at], setting)) != field.default:
                values[key] = value
        if lookup is not None:
            values["lookup"] = getattr(lookup, lookup.number_setting)
        words = [name] if alias.default is None else [name, str(number)]
        words += [f"{key}={short_text(value)}" for key, value in values.items()]
        if values.keys() <= {*alias.settings}:
            uses.append(":".join(words))
    return sorted(uses, key=lambda use: use.count("="))


def _search_of(
    text: str, alias: Alias, values: dict[str, str], number: int | None
) -> str:
    """The search of an alias, with its number."""
    search, chosen = alias.composed.partition("/")[2], values.get("search")
    if chosen is not None and chosen not in _SEARCHES:
        raise UserError(
            f"{text!r}: search must be one of {', '.join(_SEARCHES)}, not {chosen!r}."
        )
    # The number of a draft model is that of its tokens.
    in_chains = search == "chains"
    drafts = values.get("drafts", "1") if in_chains else str(number)
    if in_chains and not drafts.isdecimal():
        raise UserError(f"{text!r}: drafts must be a number, not {drafts!r}.")
    if chosen == "exact" and not in_chains and not _has_exact_search(alias, values):
        raise UserError(
            f"{text!r}: an exact search needs refiners with finitely many states; use "
            "search=beam."
        )
    if search == "static:N" and chosen not in (None, "best", "static"):
        raise UserError(f"{text!r}: search must be static or best for a tree.")
    if chosen == "greedy":
        if drafts != "1":
            raise UserError(f"{text!r}: search=greedy drafts one path: give 1 draft.")
        return "greedy"
    if in_chains and chosen in (None, "static"):
        return f"chains:{drafts}"
    if in_chains and chosen == "best":
        return f"tree:{1 + int(drafts) * (number or 0)}"
    if chosen is None or (chosen == "exact" and not in_chains):
        return search.replace("N", drafts)
    return f"{_SEARCHES[chosen]}:{drafts}"


def _has_exact_search(alias: Alias, values: dict[str, str]) -> bool:
    if "neural" in alias.composed:
        return values.get("mode") == "parallel"
    return alias.composed.startswith("heads") and "recurrent" not in alias.composed


def _typed(text: str) -> Any:
    """Converts the text of a setting to a number if it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
