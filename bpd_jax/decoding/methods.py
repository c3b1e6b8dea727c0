"""Decoding methods: a source of candidates, refiners, a search and prompt lookup.

A method composes parts (`bpd_jax.drafting.parts`):

    Method(Heads(), [], Best(16))            the 16 best drafts under the block heads
    Method(Heads(), [NGram()], Best(16))     … and an n-gram model (the paper's method)
    Method(Heads(k=8), [Markov(), NGram(alpha=0.5)], Tree(32), Lookup(8))
                                             8 candidates per head, two refiners, a tree
                                             of 32 nodes, and prompt lookup in the same
                                             tree

Every method has a text, here `heads:k=8+markov+ngram:alpha=0.5/tree:32+lookup:8`, which
`bpd_jax.decoding.method_text` reads. The names of the paper and of Medusa are aliases
(`bpd_jax.decoding.aliases`): `ngram:16` is `heads+ngram/best:16`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import changed_settings, fields_of
from bpd_jax.drafting.gate import GatedDrafter
from bpd_jax.drafting.interface import Drafter
from bpd_jax.drafting.parts import (
    NODES,
    BuildContext,
    Part,
    RefinerPart,
    SearchPart,
    SourcePart,
    StandalonePart,
    find_part,
    short_text,
)
from bpd_jax.drafting.path_drafter import PathDrafter
from bpd_jax.drafting.sources.lookup import Lookup
from bpd_jax.drafting.sources.none import Auto, NoSource
from bpd_jax.drafting.union import WithLookup


@dataclasses.dataclass(frozen=True)
class Method:
    """A decoding method. Two methods are equal if their parts are.

    Attributes:
      source: the source of candidates, or a complete drafter.
      refiners: refiners, which add scores to the candidates.
      search: the search for drafts; by default that of the source, and None if the
        source is a complete drafter.
      lookup: prompt lookup, whose draft is verified in the same tree, or None.
      text: what it was read from, which is its name; "" for the text of the parts.
    """

    source: SourcePart | StandalonePart
    refiners: Sequence[RefinerPart] = ()
    search: SearchPart | None = None
    lookup: Lookup | None = None
    text: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        refiners: Any = self.refiners
        if isinstance(refiners, Part):
            refiners = (refiners,)
        object.__setattr__(self, "refiners", tuple(refiners))
        for place, kind, parts in (
            ("a refiner", RefinerPart, self.refiners),
            ("a search", SearchPart, (self.search,)),
            ("lookup", Lookup, (self.lookup,)),
        ):
            for part in parts:
                if part is not None and not isinstance(part, kind):
                    raise UserError(f"{part!r} is not {place} of a method.")
        if isinstance(self.source, SourcePart):
            if self.search is None:
                search = find_part(self.source.default_search)()
                object.__setattr__(self, "search", search)
        elif not isinstance(self.source, StandalonePart):
            raise UserError(f"{self.source!r} is not the source of a method.")
        elif len(self.all_parts) > 1:
            raise UserError(
                f"{self.name!r}: {self.source.name} is a complete method, without "
                "refiners or search."
            )
        self._check_refiners()
        late = [part.name for part in self.all_parts if part.reads_on]
        if late and self.price is not None:
            raise UserError(
                f"{self.name}: with price, some calls have no drafts, but {late[0]} "
                "must read the tokens of every call: leave out the price."
            )

    def _check_refiners(self) -> None:
        """Checks that refiners fit one another and the source."""
        if len(set(self.refiner_names)) < len(self.refiners):
            raise UserError(f"{self.name!r}: a refiner can be used once only.")
        if isinstance(self.source, StandalonePart) or self.source.offers_lattice:
            return
        for part in self.refiners:
            if part.is_finite:
                raise UserError(
                    f"{self.name}: {part.name} needs a lattice source, but the "
                    f"candidates of {self.source.name} depend on the path."
                )
        if self.is_oracle:
            raise UserError(f"{self.name}: the oracle needs a lattice source.")

    @property
    def composed(self) -> str:
        """The method as a composition of parts.

        >>> Method(Lookup(4)).composed
        'lookup:4'
        """
        text = "+".join(part.text for part in (self.source, *self.refiners))
        if self.search is not None:
            text += f"/{self.search.text}"
        return text if self.lookup is None else f"{text}+{self.lookup.text}"

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.text or self.composed

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Source, refiners, search and prompt lookup."""
        optional = (self.source, *self.refiners, self.search, self.lookup)
        return tuple(part for part in optional if part is not None)

    @property
    def refiner_names(self) -> tuple[str, ...]:
        """The names of the refiners."""
        return tuple(part.name for part in self.refiners)

    @property
    def search_name(self) -> str:
        """The name of the search, or ""."""
        return "" if self.search is None else self.search.name

    @property
    def kind(self) -> str:
        """The names of source, refiners and search, such as `heads+ngram/best`."""
        text = "+".join((self.source.name, *self.refiner_names))
        return text if self.search is None else f"{text}/{self.search.name}"

    @property
    def _counted_part(self) -> Part | None:
        """The part whose number is that of drafts, nodes or draft tokens."""
        if self.source.number_setting == "tokens":
            return self.source
        for part in (self.search, self.source):
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
        """Changed settings, without the numbers of drafts, nodes and draft tokens.

        `lookup` is the number of tokens of prompt lookup. Settings of refiners but the
        last one are prefixed with the refiner's name.
        """
        named, counted = [], self._counted_part
        for part in self.all_parts:
            prefix = f"{part.name} " if part in self.refiners[:-1] else ""
            for name, value in changed_settings(part):
                is_number = name == part.number_setting
                if not is_number or (part is self.source and part is not counted):
                    named.append((prefix + name, value))
        if self.lookup is not None:
            named.append(("lookup", self.lookup.tokens))
        return named

    def setting(self, name: str) -> Any:
        """The value of a setting; None if no part has it or it has its default.

        `lookup` is the number of draft tokens of prompt lookup. Of several parts, the
        last one with another value than the default.
        """
        if name == "lookup":
            return None if self.lookup is None else self.lookup.tokens
        for part in reversed(self.all_parts):
            changed = dict(changed_settings(part))
            if name in changed:
                return changed[name]
        return None

    def without(self, name: str) -> "Method":
        """Returns the method with one setting of its parts reset to the default."""
        return self._with(dict.fromkeys(self.all_parts), name)

    def with_setting(self, name: str, value: Any) -> "Method":
        """Returns the method with a setting of the last part that has it."""
        owners = [part for part in self.all_parts if name in fields_of(part)]
        if not owners:
            raise UserError(f"{self.name} has no setting {name!r}.")
        return self._with({owners[-1]: value}, name)

    def _with(self, values: dict[Part, Any], name: str) -> "Method":
        """Changes a setting of some parts; None stands for the default."""

        def changed(part: Any) -> Any:
            field = fields_of(part).get(name) if part in values else None
            if field is None:
                return part
            value = field.default if values[part] is None else values[part]
            return dataclasses.replace(part, **{name: value})

        return Method(
            changed(self.source),
            [changed(part) for part in self.refiners],
            changed(self.search),
            changed(self.lookup),
        )

    def with_source(self, name: str) -> "Method":
        """Returns the method with another lattice source in place of the block heads.

        The number of heads becomes the number of tokens that the other source drafts.
        Methods without block heads are returned unchanged.
        """
        heads: Any = self.source
        if not getattr(heads, "is_heads", False):
            return self
        part = find_part(name)
        source = part(**{part.number_setting: heads.heads, "k": heads.k})
        return dataclasses.replace(self, source=source, text="")

    @property
    def has_exact_search(self) -> bool:
        """Whether the search `best` finds the best paths under its scores exactly."""
        finite = all(part.is_finite for part in self.refiners)
        return finite and self.source.offers_lattice

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
    def needs_model(self) -> bool:
        """Whether it runs the model on other texts, so that it cannot be replayed."""
        return any(part.needs_model for part in self.all_parts)

    @property
    def within_lattice(self) -> bool:
        """Whether its drafts are paths of a lattice, which the oracle bounds."""
        within = self.lookup is None and not self.is_oracle
        return within and self.source.offers_lattice

    @property
    def is_oracle(self) -> bool:
        """Whether it drafts from a reference text."""
        return self.search is not None and self.search.is_oracle

    @property
    def price(self) -> float | None:
        """See `SearchPart.price`."""
        return None if self.search is None else self.search.price

    def label(self, order: int | None = None) -> str:
        words, notes = self.source.label(order), []
        if self.search is not None:
            assert isinstance(self.source, SourcePart)
            # The neural refiner comes first, as in the paper.
            ordered = sorted(self.refiners, key=lambda part: part.name != "neural")
            refiners = " + ".join(part.label(order) for part in ordered)
            words = self.search.label_with(self.source, refiners, order)
            engine = self.search.engine_label
            words += f" ({engine})" if engine else ""
            notes = [self.search.note] if self.search.note else []
        settings = [
            name if name == "adaptive" and value else f"{name} {short_text(value)}"
            for name, value in self.settings
            if name not in ("engine", "lookup")
        ]
        extra = ", ".join([*settings, *notes])
        words += f" ({extra})" if extra else ""
        if self.lookup is None:
            return words
        lookup = self.lookup.label(order)
        return f"{words}, with {lookup[0].lower()}{lookup[1:]}"

    def build(self, context: BuildContext) -> Drafter:
        context = dataclasses.replace(context, method=self.name)
        if self.lookup is None:
            drafter = self._build_without_lookup(context)
        else:
            second = self.lookup.build(context)
            context = dataclasses.replace(context, max_accepted=second.max_depth)
            first = self._build_without_lookup(context)
            if isinstance(first, PathDrafter) and first.search.draws:
                raise UserError(
                    f"{self.name}: drafts that are sampled for speculative acceptance "
                    "cannot be combined with lookup: remove it, or use exact "
                    "acceptance or a best-first tree."
                )
            drafter = WithLookup(first, second)
        # All drafts cost time, those of prompt lookup too.
        return drafter if self.price is None else GatedDrafter(drafter, self.price)

    def _build_without_lookup(self, context: BuildContext) -> Drafter:
        if isinstance(self.source, StandalonePart):
            return self.source.build(context)
        assert self.search is not None
        width = self.search.width(bool(self.refiners))
        if width is not None:
            context = dataclasses.replace(context, width=width)
        source = self.source.build(context, self.search)
        return self.search.drafter(context, source, tuple(self.refiners))


GREEDY = Method(NoSource(), text="greedy")
AUTO = Method(Auto())
