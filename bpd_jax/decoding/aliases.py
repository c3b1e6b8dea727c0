"""Aliases: the names that the paper and Medusa give to compositions of parts."""

import dataclasses
from typing import Any

from bpd_jax.errors import UserError

AUTO = "auto"

# The settings of aliases in the order in which they are written, and the parts that
# each belongs to: the first one that the alias has.
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
    """One row of the table.

    Attributes:
      source: its source, with settings.
      refiners: its refiners.
      search: its search; "" for sources that draft by themselves.
      default: the number where none is given; None for aliases without one.
      numbers: the part that the number belongs to, `source` or `search`.
      fixed: settings of the search that are part of the alias.
      settings: the settings that it takes, each with the part (`source`, `search`,
        `lookup` or the name of a refiner) and the setting that it stands for.
    """

    source: str
    refiners: tuple[str, ...] = ()
    search: str = ""
    default: int | None = None
    numbers: str = "search"
    fixed: str = ""
    settings: tuple[tuple[str, str, str], ...] = ()

    def describe(self) -> str:
        """The composition that it stands for, with N for its number."""
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
    """An alias as it was written.

    Attributes:
      name: of the alias.
      number: drafts P, nodes M or draft tokens; None for aliases without one.
      settings: what was set besides, in the order of the table.
    """

    name: str
    number: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """As it is written."""
        words = [self.name] if self.number is None else [self.name, str(self.number)]
        words += [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.settings
        ]
        return ":".join(words)

    def without(self, name: str) -> "AliasUse":
        """The same use without one setting."""
        kept = tuple(pair for pair in self.settings if pair[0] != name)
        return dataclasses.replace(self, settings=kept)


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
"""The aliases; `auto`, which is no composition, is not among them."""


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
        written = words.pop(0)
        if number is None:
            raise UserError(f"{text!r}: {name} takes no number.")
        if not written.isdecimal():
            raise UserError(f"{text!r}: {written!r} is not a number.")
        number = int(written)
    given: dict[str, str] = {}
    known = [setting[0] for setting in alias.settings]
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known or key in given:
            raise UserError(
                f"{text!r}: {word!r} is not a setting of {name}, which takes "
                f"{', '.join(known) or 'none'}, each once and written NAME=VALUE."
            )
        given[key] = value
    search = _search_of(text, alias, given, number)
    pieces: dict[str, list[str]] = {
        key: [] for key in ("source", "search", "lookup", *alias.refiners)
    }
    for setting, part, field in alias.settings:
        if setting not in given or setting in ("search", "lookup", "drafts"):
            continue
        trees = search.split(":")[0] in ("tree", "static", "greedy")
        if setting == "normalise" and trees:
            raise UserError(
                f"{text!r}: trees grow by normalised scores in any case, and a greedy "
                f"walk does not depend on them, so {setting} changes nothing: leave it "
                "out."
            )
        pieces[part].append(f"{field}={given[setting]}")
    source = alias.source
    if alias.numbers == "source" and number is not None:
        source += f":{number}"
    composed = ":".join([source, *pieces["source"]])
    for refiner in alias.refiners:
        composed += "+" + ":".join([refiner, *pieces[refiner]])
    if search:
        composed += "/" + ":".join([search, *pieces["search"]])
    if "lookup" in given:
        composed += f"+lookup:{given['lookup']}"
    settings = tuple((key, _typed(given[key])) for key in known if key in given)
    return AliasUse(name, number, settings), composed


def _search_of(
    text: str, alias: Alias, given: dict[str, str], number: int | None
) -> str:
    """The search part of an alias, with its number."""
    if not alias.search:
        return ""
    asked = given.get("search")
    if asked is not None and asked not in _SEARCHES:
        raise UserError(
            f"{text!r}: search must be one of {', '.join(_SEARCHES)}, not {asked!r}."
        )
    if alias.numbers == "source":
        return _draft_model_search(text, given, number)
    if number is None:
        return alias.search
    if asked == "exact" and not _has_exact_search(alias, given):
        raise UserError(
            f"{text!r}: an exact search needs refiners with finitely many states; use "
            "search=beam."
        )
    if asked is None:
        return f"{alias.search}:{number}{alias.fixed}"
    if alias.search == "static" and asked not in _TREES:
        raise UserError(f"{text!r}: search must be static or best for a tree.")
    if asked == "greedy" and number > 1:
        raise UserError(
            f"{text!r}: search=greedy drafts one path: leave the number of drafts out "
            "or write 1."
        )
    if asked == "greedy":
        return "greedy"
    fixed = alias.fixed if asked == "exact" else ""
    return f"{_SEARCHES[asked]}:{number}{fixed}"


def _has_exact_search(alias: Alias, given: dict[str, str]) -> bool:
    if "neural" in alias.refiners:
        return given.get("mode") == "parallel"
    return alias.source == "heads" and "recurrent" not in alias.refiners


def _draft_model_search(text: str, given: dict[str, str], number: int | None) -> str:
    drafts, asked = given.get("drafts", "1"), given.get("search")
    if not drafts.isdecimal():
        raise UserError(f"{text!r}: drafts must be a number, not {drafts!r}.")
    if asked in (None, "static"):
        return f"chains:{drafts}"
    if asked == "greedy":
        if drafts != "1":
            raise UserError(
                f"{text!r}: search=greedy drafts one path: leave drafts out."
            )
        return "greedy"
    if asked == "best":
        return f"tree:{1 + int(drafts) * (number or 0)}"
    return f"{_SEARCHES[str(asked)]}:{drafts}"


def _typed(text: str) -> Any:
    """The value of a setting as a number, if it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
