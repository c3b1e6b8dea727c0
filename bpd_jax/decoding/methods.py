"""Decoding methods by name: a source, refiners, a search and prompt lookup.

A method composes registered parts (`bpd_jax.drafting.parts`):

    heads/best:16                        the 16 best drafts under the block heads
    heads+ngram/best:16                  … and an n-gram model (the paper's method)
    heads:k=8+markov+ngram:alpha=0.5/tree:32+lookup:8
                                         8 candidates per head, two refiners, a tree of
                                         32 nodes, and prompt lookup in the same tree

A part is written as its name, its number if it has one, and its settings. The names of
the paper and of Medusa are aliases (`bpd_jax.decoding.aliases`): `ngram:16` is
`heads+ngram/best:16`.
"""

import dataclasses
import difflib
import functools
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import fields_of, parse_setting
from bpd_jax.decoding.aliases import ALIASES, AUTO, AliasUse, expand, possible_uses
from bpd_jax.drafting.interface import Drafter
from bpd_jax.drafting.parts import (
    NODES,
    BuildContext,
    Part,
    RefinerPart,
    SearchPart,
    SourcePart,
    StandalonePart,
    parts,
    short_text,
)
from bpd_jax.drafting.path_drafter import PathDrafter
from bpd_jax.drafting.union import UnionDrafter


@dataclasses.dataclass(frozen=True)
class Method:
    """A decoding method. Two methods are equal if their parts are.

    Attributes:
      source: the source of candidates; None for `auto`.
      refiners: refiners, which add scores to the candidates.
      search: the search for drafts; None if the source is a complete drafter.
      lookup: prompt lookup, whose draft is verified in the same tree, or None.
      alias: the alias that it was parsed from, or None.
    """

    source: SourcePart | StandalonePart | None
    refiners: tuple[RefinerPart, ...] = ()
    search: SearchPart | None = None
    lookup: StandalonePart | None = None
    alias: AliasUse | None = dataclasses.field(default=None, compare=False)

    @property
    def composed(self) -> str:
        """The method as a composition of parts."""
        if self.source is None:
            return AUTO
        text = "+".join(part.text for part in (self.source, *self.refiners))
        if self.search is not None:
            text += f"/{self.search.text}"
        return text if self.lookup is None else f"{text}+{self.lookup.text}"

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.composed if self.alias is None else self.alias.text

    @functools.cached_property
    def known_as(self) -> AliasUse | None:
        """The alias that it was parsed from, or one that is equal to the composition.

        >>> parse_method("heads:k=8+ngram/best:16").known_as.text
        'ngram:16:k=8'
        """
        if self.alias is not None or self.source is None:
            return self.alias
        uses = possible_uses((self.source, *self.refiners), self.search, self.lookup)
        for use in uses:
            try:
                method = parse_method(use)
            except UserError:  # The alias does not take this value of a setting.
                continue
            if method == self:
                return method.alias
        return None

    @property
    def common_name(self) -> str:
        """The name as an alias where there is one, so that equal methods share it."""
        return self.composed if self.known_as is None else self.known_as.text

    @property
    def kind(self) -> str:
        """The name of the alias, or the names of source, refiners and search.

        An alias and the composition that it stands for are of the same kind.
        """
        if self.known_as is not None:
            return self.known_as.name
        if self.source is None:
            return AUTO
        text = "+".join(part.name for part in (self.source, *self.refiners))
        return text if self.search is None else f"{text}/{self.search.name}"

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Source, refiners, search and prompt lookup."""
        optional = (self.source, *self.refiners, self.search, self.lookup)
        return tuple(part for part in optional if part is not None)

    @property
    def _counted_part(self) -> Part | None:
        """The part whose number is that of drafts, nodes or draft tokens."""
        source = self.source
        if source is not None and source.number_setting == "tokens":
            return source
        for part in (self.search, source):
            if part is not None and part.number_setting not in ("", "heads", "length"):
                return part
        return None

    @property
    def count(self) -> int:
        """Number of drafts P, nodes M or draft tokens; 1 if no part has a number."""
        part = self._counted_part
        return 1 if part is None else int(getattr(part, part.number_setting))

    @property
    def counts(self) -> str:
        """The unit of `count`: `DRAFTS`, `NODES`, the name of a setting, or ""."""
        if self.search is not None and self.search.counts == NODES:
            return NODES
        part = self._counted_part
        if part is None:
            return ""
        return getattr(part, "counts", "") or part.number_setting

    @property
    def settings(self) -> list[tuple[str, Any]]:
        """Settings without the number, with the names of the alias or of the parts."""
        if self.known_as is not None:
            return list(self.known_as.settings)
        return [
            (name, value)
            for part in self.all_parts
            for name, field in fields_of(part).items()
            if (value := getattr(part, name)) != field.default
            and name != part.number_setting
        ]

    def setting(self, name: str) -> Any:
        """The value of a setting; None if no part has it or it has its default.

        `lookup` is the number of draft tokens of prompt lookup.
        """
        alias_settings = dict(() if self.known_as is None else self.known_as.settings)
        if name in alias_settings:
            return alias_settings[name]
        if name == "lookup":
            return getattr(self.lookup, "tokens", None)
        for part in self.all_parts:
            field = fields_of(part).get(name)
            if field is not None and getattr(part, name) != field.default:
                return getattr(part, name)
        return None

    def without(self, name: str) -> "Method":
        """Returns the method with one setting of its parts reset to the default."""

        def reset(part: Any) -> Any:
            field = fields_of(part).get(name) if part is not None else None
            if field is None:
                return part
            return dataclasses.replace(part, **{name: field.default})

        return dataclasses.replace(
            self,
            source=reset(self.source),
            refiners=tuple(reset(part) for part in self.refiners),
            search=reset(self.search),
            alias=None if self.alias is None else self.alias.without(name),
        )

    def with_setting(self, name: str, value: Any) -> "Method":
        """Returns the method with a setting of the alias, or of the first part with it.

        Raises:
          UserError: there is no such setting, or the value is invalid.
        """
        alias = self.known_as
        if alias and (self.alias or name in ALIASES[alias.name].settings):
            changed = parse_method(f"{alias.without(name).text}:{name}={value}")
            return changed if self.alias else dataclasses.replace(changed, alias=None)
        owner = next((p for p in self.all_parts if name in fields_of(p)), None)
        if owner is not None:
            new: Any = dataclasses.replace(owner, **{name: value})
            return dataclasses.replace(
                self,
                source=new if owner is self.source else self.source,
                refiners=tuple(new if p is owner else p for p in self.refiners),
                search=new if owner is self.search else self.search,
                lookup=new if owner is self.lookup else self.lookup,
            )
        raise UserError(f"{self.name} has no setting {name!r}.")

    def with_source(self, name: str) -> "Method":
        """Returns the method with another lattice source in place of the block heads.

        The number of heads becomes the number of tokens that the other source drafts.
        Methods without block heads are returned unchanged.

        >>> parse_method("ngram:16:heads=3").with_source("block").composed
        'block:3+ngram/best:16'
        """
        heads: Any = self.source
        if heads is None or heads.name != "heads":
            return self
        part: Any = parts(SourcePart)[name]
        source = part(**{part.number_setting: heads.heads, "k": heads.k})
        # It is known by the same alias.
        return dataclasses.replace(self, source=source, alias=self.known_as)

    @property
    def source_name(self) -> str:
        """The name of the source, or ""."""
        return "" if self.source is None else self.source.name

    @property
    def refiner_names(self) -> tuple[str, ...]:
        """The names of the refiners."""
        return tuple(part.name for part in self.refiners)

    @property
    def search_name(self) -> str:
        """The name of the search, or ""."""
        return "" if self.search is None else self.search.name

    @property
    def has_exact_search(self) -> bool:
        """Whether the search `best` finds the best paths under its scores exactly."""
        offers = isinstance(self.source, SourcePart) and self.source.offers_lattice
        return offers and all(part.is_finite for part in self.refiners)

    @property
    def with_default_count(self) -> "Method":
        """The method with the default number of drafts, nodes or draft tokens."""
        part = self._counted_part
        return self if part is None else self.without(part.number_setting)

    @property
    def needs(self) -> frozenset[str]:
        """Names of the assets that it requires."""
        return frozenset(name for part in self.all_parts for name in part.needs)

    @property
    def needs_hidden(self) -> bool:
        """Whether a replay requires recorded hidden states."""
        return any(part.needs_hidden for part in self.all_parts)

    @property
    def needs_model(self) -> bool:
        """Whether it runs the model on other texts, so that it cannot be replayed."""
        return any(part.needs_model for part in self.all_parts)

    @property
    def within_lattice(self) -> bool:
        """Whether its drafts are paths of a lattice, which the oracle bounds."""
        offers = isinstance(self.source, SourcePart) and self.source.offers_lattice
        return offers and self.lookup is None and not self.is_oracle

    @property
    def is_oracle(self) -> bool:
        """Whether it drafts from a reference text."""
        return self.search_name == "oracle"

    def label(self, order: int | None = None) -> str:
        """The display name.

        Args:
          order: order of the n-gram model, if there is one.
        """
        if self.source is None:
            return "Automatic"
        words = self._words(order)
        engine = getattr(self.search, "engine", "auto")
        words += "" if engine == "auto" else f" ({engine})"
        # The words include these settings.
        hidden = {"engine", "drafts", "search"}
        if self.search_name == "beam":
            hidden.remove("search")
        extra = [
            name if name == "adaptive" and value else f"{name} {short_text(value)}"
            for name, value in self.settings
            if name not in hidden
        ]
        words += f" ({', '.join(extra)})" if extra else ""
        if self.lookup is None or self.known_as is not None:
            return words
        lookup = self.lookup.label(order)
        return f"{words}, with {lookup[0].lower()}{lookup[1:]}"

    def _words(self, order: int | None) -> str:
        assert self.source is not None
        if self.search is None:
            return self.source.label(order)
        # The neural refiner comes first, as in the paper.
        ordered = sorted(self.refiners, key=lambda part: part.name != "neural")
        refiners = " + ".join(part.label(order) for part in ordered)
        search, from_heads = self.search.label(order), self.source.name == "heads"
        source = "" if from_heads else self.source.label(order)
        if self.search.name == "chains":
            chains = [search] if self.search.drafts > 1 else []
            return ", ".join(
                word for word in (self.source.label(order), refiners, *chains) if word
            )
        if from_heads and not refiners:
            if self.search.name == "greedy":
                return "BPD"
            if self.search.name in ("oracle", "static"):
                return search
            refiners = "0-gram"
        scores = " + ".join(word for word in (source, refiners) if word)
        if not scores:
            return search
        comma = self.search.counts == NODES or self.search.name == "greedy"
        return f"{search}, {scores}" if comma else f"{search} {scores}"

    def build(self, context: BuildContext) -> Drafter:
        """Builds the drafter.

        Args:
          context: the model and its assets.

        Raises:
          UserError: an asset is missing or does not fit the model.
        """
        if self.source is None:
            raise UserError(
                "auto is not a method by itself: name a method, or let decode or "
                "generate measure which method is fastest (choose_method)."
            )
        context = dataclasses.replace(context, method=self.name)
        if self.lookup is None:
            return self._build_without_lookup(context)
        second = self.lookup.build(context)
        context = dataclasses.replace(context, max_accepted=second.max_depth)
        first = self._build_without_lookup(context)
        if isinstance(first, PathDrafter) and first.search.draws:
            raise UserError(
                f"{self.name}: drafts that are sampled for speculative acceptance "
                "cannot be combined with lookup: remove it, or use exact acceptance or "
                "a best-first tree."
            )
        return UnionDrafter(first, second)

    def _build_without_lookup(self, context: BuildContext) -> Drafter:
        if isinstance(self.source, StandalonePart):
            return self.source.build(context)
        assert self.source is not None
        assert self.search is not None
        if self.search.name == "greedy" and not self.refiners:
            # A greedy walk without refiners needs one candidate per head.
            context = dataclasses.replace(context, width=1)
        source = self.source.build(context, self.search)
        return self.search.drafter(context, source, self.refiners)


def parse_method(text: str) -> Method:
    """Parses a method.

    >>> parse_method("ngram:16:k=8").composed
    'heads:k=8+ngram/best:16'

    Raises:
      UserError: a part, number or setting is unknown, or the parts are incompatible.
    """
    text = text.strip()
    if text == AUTO:
        return Method(None, alias=AliasUse(AUTO))
    name = text.split(":")[0]
    if name in ALIASES and "/" not in text and "+" not in text:
        use, composed = expand(text)
        return dataclasses.replace(_parse_composed(composed, use.text), alias=use)
    return _parse_composed(text, text)


def _parse_composed(text: str, name: str) -> Method:
    before, slash, after = text.partition("/")
    first_word, *middle_words = before.split("+")
    search_word, *last_words = after.split("+")
    source = _parse_part(first_word, name, (SourcePart, StandalonePart))
    middle = [
        _parse_part(word, name, (RefinerPart, StandalonePart)) for word in middle_words
    ]
    refiners = tuple(part for part in middle if isinstance(part, RefinerPart))
    lookups = [part for part in middle if isinstance(part, StandalonePart)]
    if slash and middle and isinstance(middle[-1], StandalonePart):
        raise UserError(f"{name!r}: {middle[-1].name} comes after the search.")
    lookups += [_parse_part(word, name, (StandalonePart,)) for word in last_words]
    if len(lookups) > 1 or any(part.name != "lookup" for part in lookups):
        raise UserError(f"{name!r}: only one lookup can follow another source.")
    if len({part.name for part in refiners}) < len(refiners):
        raise UserError(f"{name!r}: a refiner can be used once only.")
    if isinstance(source, StandalonePart):
        if slash or refiners or lookups:
            raise UserError(
                f"{name!r}: {source.name} is a complete method, without refiners or "
                "search."
            )
        return Method(source)
    assert isinstance(source, SourcePart)
    search_text = search_word if slash else source.default_search
    search = _parse_part(search_text, name, (SearchPart,))
    assert isinstance(search, SearchPart)
    method = Method(source, refiners, search, lookups[0] if lookups else None)
    if not source.offers_lattice:
        for part in refiners:
            if part.is_finite or part.needs_hidden:
                raise UserError(
                    f"{name}: {part.name} needs a lattice source, but the candidates "
                    f"of {source.name} depend on the path."
                )
        if method.is_oracle:
            raise UserError(f"{name}: the oracle needs a lattice source.")
    return method


def _parse_part(text: str, method: str, kinds: tuple[type[Part], ...]) -> Any:
    name, *words = text.split(":")
    known = {k: v for kind in kinds for k, v in parts(kind).items()}
    part = known.get(name)
    if part is None:
        names = {**known, **ALIASES} if SourcePart in kinds else known
        close = difflib.get_close_matches(name, names, n=1)
        role = _role_of(name)
        if role:
            hint = f"{name} is {role}"
        elif close:
            hint = f"did you mean {close[0]}"
        else:
            hint = f"choose from {', '.join(known)}"
        raise UserError(
            f"unknown method {method!r}: there is no {_role(kinds)} {name!r}; {hint}; "
            "--method=help lists all."
        )
    fields = fields_of(part)
    values: dict[str, Any] = {}
    if words and "=" not in words[0]:
        if not part.number_setting:
            raise UserError(f"{method!r}: {name} takes no number.")
        number = words.pop(0)
        values[part.number_setting] = parse_setting(
            part, part.number_setting, number, f"{method!r}: "
        )
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in fields or key in values:
            listed = ", ".join(fields) or "no settings"
            raise UserError(
                f"{method!r}: {word!r} is not a setting of {name}, which takes "
                f"{listed}, each once and written NAME=VALUE."
            )
        values[key] = parse_setting(part, key, value, f"{method!r}: ")
    return part(**values)


def _role(kinds: tuple[type[Part], ...]) -> str:
    if SourcePart in kinds:
        return "method or source"
    return {RefinerPart: "refiner", SearchPart: "search"}.get(kinds[0], "source")


def _role_of(name: str) -> str:
    """The role of a part and how to write it; "" if there is no such part."""
    if name in parts(RefinerPart):
        return f"a refiner, as in heads+{name}/best:16"
    if name in parts(SearchPart):
        return f"a search, as in heads+ngram/{name}"
    return "a source" if name in parts() else ""
