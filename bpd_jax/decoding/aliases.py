"""Aliases: the names that the paper and Medusa give to compositions of parts."""

import dataclasses
from typing import Any

from bpd_jax.errors import UserError

AUTO = "auto"

# The searches by the values of the setting `search` of aliases.
_SEARCHES = {
    "exact": "best",
    "greedy": "greedy",
    "beam": "beam",
    "best": "tree",
    "static": "static",
}
_TREES = ("best", "static")


@dataclasses.dataclass(frozen=True)
class Alias:
    """The definition of an alias.

    Attributes:
      source: name of its source.
      refiners: names of its refiners.
      search: name of its search; "" for sources that are complete methods.
      default: default of its number; None for aliases without a number.
      numbers: the part that the number belongs to, `source` or `search`.
      fixed: settings of the search that are part of the alias.
      settings: its settings, each with a part (`source`, `search`, `lookup` or the name
        of a refiner) and the corresponding setting of the part.
    """

    source: str
    refiners: tuple[str, ...] = ()
    search: str = ""
    default: int | None = None
    numbers: str = "search"
    fixed: str = ""
    settings: tuple[tuple[str, str, str], ...] = ()

    def describe(self) -> str:
        """The equivalent composition, with N for the number."""
        text = "+".join((self.source, *self.refiners))
        number = "" if self.default is None else ":N"
        if self.numbers == "source":
            text += number
        if self.search:
            text += f"/{self.search}{number if self.numbers == 'search' else ''}"
            text += self.fixed
        return text


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


_SOURCE = (("k", "source", "k"), ("heads", "source", "heads"))
_LOOKUP = ("lookup", "lookup", "tokens")
_SEARCH = ("search", "search", "")
_NORMALISE = ("normalise", "search", "normalise")
_ORDER = ("order", "search", "order")


def _weights(refiner: str) -> tuple[tuple[str, str, str], ...]:
    return (*_SOURCE, ("alpha", refiner, "alpha"), ("slope", refiner, "slope"))


_NGRAM = (*_weights("ngram"), _SEARCH, ("adaptive", "ngram", "adaptive"))
_NEURAL = (*_weights("neural"), _SEARCH, ("mode", "neural", "mode"))
_HEADS = (*_SOURCE, _SEARCH, _LOOKUP)

ALIASES: dict[str, Alias] = {
    "greedy": Alias("none"),
    "bpd": Alias("heads", search="greedy", settings=(*_SOURCE[1:], _LOOKUP)),
    "zero_gram": Alias("heads", (), "best", 1, settings=_HEADS),
    "ngram": Alias(
        "heads", ("ngram",), "best", 1, settings=(*_NGRAM, _NORMALISE, _LOOKUP)
    ),
    "ngram_device": Alias(
        "heads",
        ("ngram",),
        "best",
        1,
        fixed=":engine=device",
        settings=(*_NGRAM, _NORMALISE, _LOOKUP),
    ),
    "ngram_viterbi": Alias(
        "heads",
        ("ngram",),
        "best",
        1,
        fixed=":engine=viterbi",
        settings=(*_weights("ngram"), _LOOKUP),
    ),
    "ngram_fst": Alias(
        "heads",
        ("ngram",),
        "best",
        1,
        fixed=":engine=fst",
        settings=(*_weights("ngram")[:3], _LOOKUP),
    ),
    "neural": Alias(
        "heads", ("neural",), "best", 1, settings=(*_NEURAL, _NORMALISE, _LOOKUP)
    ),
    "neural_ngram": Alias(
        "heads",
        ("ngram", "neural"),
        "best",
        1,
        settings=(
            *_weights("neural"),
            ("beta", "ngram", "alpha"),
            _SEARCH,
            _NORMALISE,
            _LOOKUP,
        ),
    ),
    "markov": Alias(
        "heads",
        ("markov",),
        "best",
        1,
        settings=(*_weights("markov"), _SEARCH, _NORMALISE, _LOOKUP),
    ),
    "recurrent": Alias(
        "heads",
        ("recurrent",),
        "best",
        1,
        settings=(*_weights("recurrent"), _SEARCH, _NORMALISE, _LOOKUP),
    ),
    "medusa": Alias("heads", (), "static", 32, settings=_HEADS),
    "medusa_ngram": Alias(
        "heads", ("ngram",), "static", 32, settings=(*_NGRAM, _ORDER, _LOOKUP)
    ),
    "medusa_neural": Alias(
        "heads", ("neural",), "static", 32, settings=(*_NEURAL, _ORDER, _LOOKUP)
    ),
    "hydra": Alias("hydra", (), "best", 1, settings=_HEADS),
    "prompt_lookup": Alias(
        "lookup", default=8, numbers="source", settings=(("match", "source", "match"),)
    ),
    "lookahead": Alias(
        "lookahead",
        default=8,
        numbers="source",
        settings=(("order", "source", "order"), ("guesses", "source", "guesses")),
    ),
    "draft_model": Alias(
        "draft_model",
        (),
        "chains",
        5,
        "source",
        settings=(("k", "source", "k"), _SEARCH, ("drafts", "search", "drafts")),
    ),
    "oracle": Alias("heads", (), "oracle", settings=_SOURCE),
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
    known = [setting[0] for setting in alias.settings]
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known or key in values:
            raise UserError(
                f"{text!r}: {word!r} is not a setting of {name}, which takes "
                f"{', '.join(known) or 'none'}, each once and written NAME=VALUE."
            )
        values[key] = value
    search = _search_of(text, alias, values, number)
    pieces: dict[str, list[str]] = {
        key: [] for key in ("source", "search", "lookup", *alias.refiners)
    }
    for setting, part, field in alias.settings:
        if setting not in values or setting in ("search", "lookup", "drafts"):
            continue
        trees = search.split(":")[0] in ("tree", "static", "greedy")
        if setting == "normalise" and trees:
            raise UserError(
                f"{text!r}: {setting} changes nothing for trees, which always "
                "normalise scores, and for greedy walks: leave it out."
            )
        pieces[part].append(f"{field}={values[setting]}")
    source = alias.source
    if alias.numbers == "source" and number is not None:
        source += f":{number}"
    composed = ":".join([source, *pieces["source"]])
    for refiner in alias.refiners:
        composed += "+" + ":".join([refiner, *pieces[refiner]])
    if search:
        composed += "/" + ":".join([search, *pieces["search"]])
    if "lookup" in values:
        composed += f"+lookup:{values['lookup']}"
    settings = tuple((key, _typed(values[key])) for key in known if key in values)
    return AliasUse(name, number, settings), composed


def _search_of(
    text: str, alias: Alias, values: dict[str, str], number: int | None
) -> str:
    """The search of an alias, with its number."""
    if not alias.search:
        return ""
    search = values.get("search")
    if search is not None and search not in _SEARCHES:
        raise UserError(
            f"{text!r}: search must be one of {', '.join(_SEARCHES)}, not {search!r}."
        )
    if alias.numbers == "source":
        return _draft_model_search(text, values, number)
    if number is None:
        return alias.search
    if search == "exact" and not _has_exact_search(alias, values):
        raise UserError(
            f"{text!r}: an exact search needs refiners with finitely many states; use "
            "search=beam."
        )
    if search is None:
        return f"{alias.search}:{number}{alias.fixed}"
    if alias.search == "static" and search not in _TREES:
        raise UserError(f"{text!r}: search must be static or best for a tree.")
    if search == "greedy" and number > 1:
        raise UserError(
            f"{text!r}: search=greedy drafts one path: omit the number of drafts or "
            "use 1."
        )
    if search == "greedy":
        return "greedy"
    fixed = alias.fixed if search == "exact" else ""
    return f"{_SEARCHES[search]}:{number}{fixed}"


def _has_exact_search(alias: Alias, values: dict[str, str]) -> bool:
    if "neural" in alias.refiners:
        return values.get("mode") == "parallel"
    return alias.source == "heads" and "recurrent" not in alias.refiners


def _draft_model_search(text: str, values: dict[str, str], number: int | None) -> str:
    drafts, search = values.get("drafts", "1"), values.get("search", "static")
    if not drafts.isdecimal():
        raise UserError(f"{text!r}: drafts must be a number, not {drafts!r}.")
    if search == "static":
        return f"chains:{drafts}"
    if search == "greedy":
        if drafts != "1":
            raise UserError(f"{text!r}: search=greedy drafts one path: omit drafts.")
        return "greedy"
    if search == "best":
        return f"tree:{1 + int(drafts) * (number or 0)}"
    return f"{_SEARCHES[search]}:{drafts}"


def _typed(text: str) -> Any:
    """Converts the text of a setting to a number if it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
