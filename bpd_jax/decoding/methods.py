"""Decoding methods by name: a source, refiners, a search, and what is verified beside.

A method composes registered parts (`bpd_jax.drafting.parts`):

    heads/best:16                        the 16 best drafts under the block heads
    heads+ngram/best:16                  … and an n-gram model (the paper's)
    heads:k=8+markov+ngram:alpha=0.5/tree:32+lookup:8
                                         8 candidates per head under two refiners, a
                                         tree of 32 nodes, with prompt lookup beside it

A part is written as its name, then its number if it has one, then settings. The names
of the paper and of Medusa are aliases (`bpd_jax.decoding.aliases`): `ngram:16` is
`heads+ngram/best:16`.
"""

import dataclasses
import difflib
from typing import Any

from bpd_jax.decoding.aliases import ALIASES, AUTO, AliasUse, expand
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
)
from bpd_jax.drafting.path_drafter import PathDrafter
from bpd_jax.drafting.union import UnionDrafter
from bpd_jax.errors import UserError
from bpd_jax.settings import fields_of, parse_setting


@dataclasses.dataclass(frozen=True)
class Method:
    """A decoding method. Two methods are equal if their parts are.

    Attributes:
      source: what offers candidates; None for `auto`, which measures methods.
      refiners: what adds scores to them.
      search: how drafts are grown; None if the source drafts by itself.
      beside: a second source whose drafts are verified in the same tree, or None.
      alias: the alias that it was written as, or None.
    """

    source: SourcePart | StandalonePart | None
    refiners: tuple[RefinerPart, ...] = ()
    search: SearchPart | None = None
    beside: StandalonePart | None = None
    alias: AliasUse | None = dataclasses.field(default=None, compare=False)

    @property
    def composed(self) -> str:
        """The method as a composition of parts."""
        if self.source is None:
            return AUTO
        text = "+".join(part.text for part in (self.source, *self.refiners))
        if self.search is not None:
            text += f"/{self.search.text}"
        return text if self.beside is None else f"{text}+{self.beside.text}"

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        return self.composed if self.alias is None else self.alias.text

    @property
    def kind(self) -> str:
        """The alias without its number and settings, or the names of the parts."""
        if self.alias is not None:
            return self.alias.name
        if self.source is None:
            return AUTO
        text = "+".join(part.name for part in (self.source, *self.refiners))
        return text if self.search is None else f"{text}/{self.search.name}"

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Source, refiners, search and what is verified beside them."""
        optional = (self.source, *self.refiners, self.search, self.beside)
        return tuple(part for part in optional if part is not None)

    @property
    def numbered(self) -> Part | None:
        """The part whose number counts the drafts, nodes or draft tokens."""
        source = self.source
        if source is not None and source.number == "tokens":
            return source
        for part in (self.search, source):
            if part is not None and part.number not in ("", "heads", "length"):
                return part
        return None

    @property
    def count(self) -> int:
        """Drafts P, nodes M or draft tokens; 1 where nothing is counted."""
        part = self.numbered
        return 1 if part is None else int(getattr(part, part.number))

    @property
    def counts(self) -> str:
        """What `count` counts: `DRAFTS`, `NODES`, another word, or ""."""
        if self.search is not None and self.search.counts == NODES:
            return NODES
        part = self.numbered
        if part is None:
            return ""
        return getattr(part, "counts", "") or part.number

    @property
    def settings(self) -> list[tuple[str, Any]]:
        """What was set besides the number, named as in the alias or in the parts."""
        if self.alias is not None:
            return list(self.alias.settings)
        return [
            (name, value)
            for part in self.all_parts
            for name, field in fields_of(part).items()
            if (value := getattr(part, name)) != field.default and name != part.number
        ]

    def setting(self, name: str) -> Any:
        """The value of a setting of any part; None if no part has it or it was not set.

        `lookup` is the number of tokens of a prompt lookup beside the method.
        """
        written = dict(() if self.alias is None else self.alias.settings)
        if name in written:
            return written[name]
        if name == "lookup":
            return getattr(self.beside, "tokens", None)
        for part in self.all_parts:
            field = fields_of(part).get(name)
            if field is not None and getattr(part, name) != field.default:
                return getattr(part, name)
        return None

    def without(self, name: str) -> "Method":
        """The same method with one setting, of whatever part, at its default."""

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
        """The same method with one more setting, of the alias or of the first part.

        Raises:
          UserError: it has no such setting, or the value is not allowed.
        """
        if self.alias is not None:
            return parse_method(f"{self.alias.without(name).text}:{name}={value}")
        owner = next((p for p in self.all_parts if name in fields_of(p)), None)
        if owner is not None:
            changed: Any = dataclasses.replace(owner, **{name: value})
            return dataclasses.replace(
                self,
                source=changed if owner is self.source else self.source,
                refiners=tuple(changed if p is owner else p for p in self.refiners),
                search=changed if owner is self.search else self.search,
            )
        raise UserError(f"{self.name} has no setting {name!r}.")

    def with_source(self, name: str) -> "Method":
        """The same method with another lattice source in place of the block heads.

        A number of heads becomes the number of tokens that the other source drafts.
        Methods that do not draft from block heads are returned unchanged.

        >>> parse_method("ngram:16:heads=3").with_source("block").composed
        'block:3+ngram/best:16'
        """
        heads = self.source
        if heads is None or heads.name != "heads":
            return self
        other: Any = parts(SourcePart)[name]
        written = {other.number: getattr(heads, heads.number)}
        written["k"] = heads.k
        return dataclasses.replace(self, source=other(**written))

    @property
    def search_name(self) -> str:
        """Of the search, or ""."""
        return "" if self.search is None else self.search.name

    @property
    def needs(self) -> frozenset[str]:
        """Assets without which it cannot draft."""
        return frozenset(name for part in self.all_parts for name in part.needs)

    @property
    def needs_hidden(self) -> bool:
        """Whether a replay needs hidden states."""
        return any(part.needs_hidden for part in self.all_parts)

    @property
    def needs_model(self) -> bool:
        """Whether it asks the model about other texts, so that no replay can answer."""
        return any(part.needs_model for part in self.all_parts)

    @property
    def within_lattice(self) -> bool:
        """Whether all its drafts are paths of the source's lattice."""
        offers = isinstance(self.source, SourcePart) and self.source.offers_lattice
        return offers and self.beside is None

    @property
    def is_oracle(self) -> bool:
        """Whether it knows the right tokens."""
        return self.search_name == "oracle"

    def label(self, order: int | None = None) -> str:
        """What people read in tables.

        Args:
          order: of the n-gram model, if there is one.
        """
        if self.source is None:
            return "Automatic"
        alias = self.alias
        words = self._words(order)
        engine = getattr(self.search, "engine", "auto")
        words += "" if engine == "auto" else f" ({engine})"
        # The words tell these already.
        hidden = {"engine", "drafts", "search"}
        if self.search_name == "beam":
            hidden.remove("search")
        extra = [
            name if name == "adaptive" and value else f"{name} {_short(value)}"
            for name, value in self.settings
            if name not in hidden
        ]
        words += f" ({', '.join(extra)})" if extra else ""
        if self.beside is None or alias is not None:
            return words
        beside = self.beside.label(order)
        return f"{words}, with {beside[0].lower()}{beside[1:]}"

    def _words(self, order: int | None) -> str:
        assert self.source is not None
        if self.search is None:
            return self.source.label(order)
        refiners = " + ".join(part.label(order) for part in self._in_order)
        search, from_heads = self.search.label(order), self.source.name == "heads"
        source = "" if from_heads else self.source.label(order)
        if self.search.name == "chains":
            several = f", {search}" if self.count_of_search > 1 else ""
            return self.source.label(order) + several
        if from_heads and not refiners:
            if self.search.name == "greedy":
                return "BPD"
            if self.search.name in ("oracle", "static"):
                return search
            refiners = "0-gram"
        what = " + ".join(word for word in (source, refiners) if word)
        if not what:
            return search
        comma = self.search.counts == NODES or self.search.name == "greedy"
        return f"{search}, {what}" if comma else f"{search} {what}"

    @property
    def count_of_search(self) -> int:
        """The number of the search, or 1."""
        if self.search is None or not self.search.number:
            return 1
        return int(getattr(self.search, self.search.number))

    @property
    def _in_order(self) -> tuple[RefinerPart, ...]:
        """Refiners, neural ones first, as the paper names them."""
        return tuple(sorted(self.refiners, key=lambda part: part.name != "neural"))

    def build(self, context: BuildContext) -> Drafter:
        """Makes the drafter.

        Args:
          context: of the model and its assets.

        Raises:
          UserError: something that it needs is missing or does not fit.
        """
        if self.source is None:
            raise UserError(
                "auto is not a method by itself: name the methods, or let decode or "
                "generate measure which one is fastest (choose_method)."
            )
        context = dataclasses.replace(context, method=self.name)
        if self.beside is None:
            return self._alone(context)
        second = self.beside.build(context)
        context = dataclasses.replace(context, reach=second.max_depth)
        first = self._alone(context)
        if isinstance(first, PathDrafter) and first.search.draws:
            raise UserError(
                f"{self.name}: drafts that are drawn for speculative sampling cannot "
                "share a tree with another source; leave that out, or use exact "
                "acceptance or a best-first tree."
            )
        return UnionDrafter(first, second)

    def _alone(self, context: BuildContext) -> Drafter:
        if isinstance(self.source, StandalonePart):
            return self.source.build(context)
        assert self.source is not None
        assert self.search is not None
        if self.search.name == "greedy" and not self.refiners:
            # The best candidate of each head is all that such a walk looks at.
            context = dataclasses.replace(context, width=1)
        source = self.source.build(context, self.search)
        if not self.source.offers_lattice:
            for part in self.refiners:
                if part.is_finite or part.needs_hidden:
                    raise UserError(
                        f"{self.name}: {part.name} refines a lattice, and the "
                        f"candidates of {self.source.name} depend on the path."
                    )
            if self.is_oracle:
                raise UserError(f"{self.name}: the oracle needs a lattice source.")
        return self.search.drafter(context, source, self.refiners)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_method(text: str) -> Method:
    """Reads a method.

    >>> parse_method("ngram:16:k=8").composed
    'heads:k=8+ngram/best:16'

    Raises:
      UserError: there is no such part, number or setting, or parts do not go together.
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
    words = before.split("+")
    later = after.split("+") if slash else []
    source = _parse_part(words[0], name, (SourcePart, StandalonePart))
    middle = [
        _parse_part(word, name, (RefinerPart, StandalonePart)) for word in words[1:]
    ]
    refiners = tuple(part for part in middle if isinstance(part, RefinerPart))
    beside = [part for part in middle if isinstance(part, StandalonePart)]
    beside += [_parse_part(word, name, (StandalonePart,)) for word in later[1:]]
    if slash and beside and middle and isinstance(middle[-1], StandalonePart):
        raise UserError(f"{name!r}: {middle[-1].name} comes after the search.")
    if len(beside) > 1 or any(part.name != "lookup" for part in beside):
        raise UserError(f"{name!r}: only one lookup can draft beside another source.")
    if len({part.name for part in refiners}) < len(refiners):
        raise UserError(f"{name!r}: a refiner can be given once only.")
    if isinstance(source, StandalonePart):
        if slash or refiners or beside:
            raise UserError(
                f"{name!r}: {source.name} drafts by itself, without refiners or search."
            )
        return Method(source)
    assert isinstance(source, SourcePart)
    written = later[0] if later else source.default_search
    search = _parse_part(written, name, (SearchPart,))
    assert isinstance(search, SearchPart)
    return Method(source, refiners, search, beside[0] if beside else None)


def _parse_part(text: str, method: str, kinds: tuple[type[Part], ...]) -> Any:
    name, *words = text.split(":")
    known = {k: v for kind in kinds for k, v in parts(kind).items()}
    part = known.get(name)
    if part is None:
        offered = {**known, **ALIASES} if SourcePart in kinds else known
        close = difflib.get_close_matches(name, offered, n=1)
        hint = (
            f"did you mean {close[0]}" if close else f"choose from {', '.join(known)}"
        )
        raise UserError(
            f"unknown method {method!r}: there is no {_role(kinds)} {name!r}; {hint}; "
            "--method=help lists all."
        )
    fields = fields_of(part)
    values: dict[str, Any] = {}
    if words and "=" not in words[0]:
        if not part.number:
            raise UserError(f"{method!r}: {name} takes no number.")
        number = words.pop(0)
        values[part.number] = parse_setting(part, part.number, number, f"{method!r}: ")
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


def describe_methods() -> str:
    """All parts and aliases with one line, their references and settings."""
    lines = [
        "METHOD = SOURCE[+REFINER …][/SEARCH][+lookup:T], or an alias. A part is NAME,",
        "NAME:NUMBER, either with :SETTING=VALUE, as in heads+ngram:alpha=0.5/best:16.",
    ]
    groups: list[tuple[str, tuple[type[Part], ...]]] = [
        ("sources", (SourcePart, StandalonePart)),
        ("refiners", (RefinerPart,)),
        ("searches", (SearchPart,)),
    ]
    for title, kinds in groups:
        lines += ["", title]
        for kind in kinds:
            for name, part in parts(kind).items():
                lines.append(f"  {name:<18}{part.help} [{part.reference}]")
                for field in fields_of(part).values():
                    number = " (the number)" if field.name == part.number else ""
                    lines.append(
                        f"      {field.name:<14}{field.metadata['help']}{number}"
                    )
    lines += ["", "aliases"]
    for name, alias in ALIASES.items():
        lines.append(f"  {name:<18}{alias.describe()}")
    lines.append(f"  {AUTO:<18}the method that is measured to be fastest here")
    return "\n".join(lines)
