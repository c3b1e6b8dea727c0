"""The parts of drafting methods, and their registry.

A part is a frozen dataclass in `sources/`, `refiners/` or `searches/`: its fields are
its settings, its class variables are printed by `--method=help`, and `build` creates
the source, refiner or search. `@register` registers it under its name. A method imports
only the modules of its parts; a name that is not that of a module, nor in `_MODULES`,
imports all modules of the three packages, and those that other packages name as entry
points of the group `bpd_jax.parts`. Or these call `register` before a method is parsed.
"""

import abc
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import changed_settings, check_settings, integer
from bpd_jax.drafting.assets import Assets, on_mesh
from bpd_jax.drafting.interface import Drafter, Refiner, Search, Source
from bpd_jax.drafting.path_drafter import PathDrafter, Paths
from bpd_jax.drafting.refiners.transitions import FiniteRefiner
from bpd_jax.models.model import Model

# Highest number of drafts or nodes of a serial call, to catch typing errors.
MOST_DRAFTS = 1024
COUNT = integer(1, MOST_DRAFTS)

DRAFTS, NODES = "drafts", "nodes"


@dataclasses.dataclass(frozen=True)
class BuildContext:
    """The arguments of `build`.

    Attributes:
      assets: n-gram models, small models and trained refiners.
      width: W, default number of candidates per position.
      alpha: default weight of refiners.
      method: name of the method, for messages.
      temperature: temperature of sampled drafts for speculative sampling; None if
        drafts are not sampled.
      max_accepted: upper bound of the tokens that one serial call accepts from prompt
        lookup.
      shared: objects that are shared between methods, by key.
    """

    model: Model
    assets: Assets
    width: int
    alpha: float
    method: str = ""
    temperature: float | None = None
    max_accepted: int = 1
    shared: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """V of the model."""
        return self.model.config.trunk.vocab_size

    def need(self, asset: str) -> Any:
        """Returns an asset; the error for a missing one explains how to create it."""
        return on_mesh(self.assets.need(asset, self.method), self.model.mesh)

    def share(self, key: Any, create: Callable[[], Any]) -> Any:
        """The result of `create`, which is called once for all methods of a decoder."""
        if key not in self.shared:
            self.shared[key] = create()
        return self.shared[key]


@dataclasses.dataclass(frozen=True)
class Part:
    """Base of all parts.

    Class variables:
      name: name in a method.
      title: display name, with settings in braces; "" for `name`.
      help: one line for `--method=help`.
      reference: publication.
      number_setting: the setting that a number after the name sets, as in `tree:32`,
        or "".
      needs: names of required assets.
      needs_model: whether it runs the model on other texts, or reads states of its
        layers that replay does not have, so that it cannot be replayed.
      reads_on: whether it reads the tokens of the last call before it drafts, so that
        it must draft in every call.
      offers_lattice: of a source, whether the candidates do not depend on the path.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    help: ClassVar[str]
    reference: ClassVar[str] = "bpd_jax"
    number_setting: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    needs_model: ClassVar[bool] = False
    reads_on: ClassVar[bool] = False
    offers_lattice: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_settings(self, f"{self.name}: ")

    @property
    def text(self) -> str:
        """Its text in a method."""
        words = [self.name]
        if self.number_setting:
            number = getattr(self, self.number_setting)
            words += [] if number is None else [short_text(number)]
        words += [
            f"{name}={short_text(value)}"
            for name, value in changed_settings(self)
            if name != self.number_setting
        ]
        return ":".join(words)

    def label(self, order: int | None = None) -> str:
        """The display name.

        Args:
          order: order of the n-gram model, if there is one.
        """
        return (self.title or self.name).format(**vars(self))


@dataclasses.dataclass(frozen=True)
class SourcePart(Part, abc.ABC):
    """A source of candidates.

    Class variables:
      default_search: the search of methods that do not name one.
      is_heads: whether it is the model's own block heads, which labels leave out.
    """

    default_search: ClassVar[str] = "greedy"
    is_heads: ClassVar[bool] = False

    @abc.abstractmethod
    def build(self, context: BuildContext, search: "SearchPart") -> Source:
        """Builds the source for a search."""


@dataclasses.dataclass(frozen=True)
class StandalonePart(Part, abc.ABC):
    """A source that is a complete drafter, without refiners and search."""

    @abc.abstractmethod
    def build(self, context: BuildContext) -> Drafter:
        """Builds the drafter."""


@dataclasses.dataclass(frozen=True)
class RefinerPart(Part, abc.ABC):
    """A refiner of a source's candidates.

    Class variables:
      finite: whether `build` returns a `FiniteRefiner`, which needs a lattice.
      normalised: whether it was trained with normalised scores; searches then
        normalise scores by default.
    """

    finite: ClassVar[bool] = False
    normalised: ClassVar[bool] = False

    @property
    def is_finite(self) -> bool:
        """`finite`, unless it depends on the settings."""
        return self.finite

    def host_weight(self, context: BuildContext) -> tuple[float, float] | None:
        """α and its slope for engines on the host; None if they lack this refiner."""
        return None

    @abc.abstractmethod
    def build(self, context: BuildContext, source: Source) -> Refiner | FiniteRefiner:
        """Builds the refiner."""


@dataclasses.dataclass(frozen=True)
class SearchPart(Part, abc.ABC):
    """A search for the drafts.

    Class variables:
      counts: unit of its number, `DRAFTS` or `NODES`; "" without a number.
      is_oracle: whether it drafts from a reference text.
      of_heads: label of a method that searches the block heads alone, "" for that of
        the search; None if it names the scores, "0-gram".
      joint: what is between the label of the search and the scores.
      note: what a label says besides the settings, or "".
    """

    counts: ClassVar[str] = ""
    is_oracle: ClassVar[bool] = False
    of_heads: ClassVar[str | None] = None
    joint: ClassVar[str] = " "
    note: ClassVar[str] = ""

    @property
    def price(self) -> float | None:
        """Time of a call with drafts in calls without, if drafts must be worth it."""
        return None

    @property
    def engine_label(self) -> str:
        """What runs the search, in a label; "" for the usual."""
        return ""

    def width(self, refined: bool) -> int | None:
        """Candidates per position that it needs; None for those of the decoder.

        `refined` is whether refiners score them.
        """
        return None

    def label_with(
        self, source: SourcePart, refiners: str, order: int | None = None
    ) -> str:
        """The display name of a source, refiners and this search."""
        label = self.label(order)
        if source.is_heads and not refiners:
            if self.of_heads is not None:
                return self.of_heads or label
            refiners = "0-gram"
        parts = ("" if source.is_heads else source.label(order), refiners)
        scores = " + ".join(part for part in parts if part)
        return f"{label}{self.joint}{scores}" if scores else label

    @property
    def drafts(self) -> int:
        """Number of drafts P, which is at most the number of paths of the lattice."""
        return getattr(self, self.number_setting) if self.counts == DRAFTS else 1

    @property
    def reach(self) -> int:
        """Tokens of the longest draft, the certain one included, if that is known.

        A source need not predict what comes later.
        """
        return sys.maxsize

    @abc.abstractmethod
    def drafter(
        self,
        context: BuildContext,
        source: Source,
        refiners: tuple[RefinerPart, ...],
    ) -> Drafter:
        """Builds the drafter of a source, refiners and this search."""


@dataclasses.dataclass(frozen=True)
class GrowingPart(SearchPart):
    """A search that runs on `Paths` in the decode loop."""

    @abc.abstractmethod
    def build(self, context: BuildContext, paths: Paths, normalise: bool) -> Search:
        """Builds the search.

        Args:
          normalise: whether a refiner was trained with normalised scores.
        """

    def drafter(
        self,
        context: BuildContext,
        source: Source,
        refiners: tuple[RefinerPart, ...],
    ) -> Drafter:
        """Builds the drafter of a source, refiners and this search."""
        finite: list[Any] = []
        others: list[Any] = []
        for part in refiners:
            (finite if part.is_finite else others).append(part.build(context, source))
        paths = Paths(source, tuple(finite), tuple(others))
        normalise = any(part.normalised for part in refiners)
        return PathDrafter(paths, self.build(context, paths, normalise))


def short_text(value: Any) -> str:
    """The text of a setting in a method, from which the same value is read.

    A plus would begin a refiner.

    >>> [short_text(value) for value in (0.5, 2.0, 1e20, 0.1234567)]
    ['0.5', '2', '1e20', '0.1234567']
    """
    if not isinstance(value, float):
        return str(value)
    return float.__repr__(value).removesuffix(".0").replace("e+", "e")


_PARTS: dict[str, type[Part]] = {}
_PACKAGES = ("sources", "refiners", "searches")

# The modules of parts that do not have the name of their module.
_MODULES = {"auto": "none", "greedy": "beam_search", "beam": "beam_search"}
_MODULES |= {"chains": "static"}

# Installed packages name modules with parts in this group of entry points.
ENTRY_POINTS = "bpd_jax.parts"
_PartType = TypeVar("_PartType", bound=type[Part])


def register(part: _PartType) -> _PartType:
    """Registers a part under its name; a class decorator.

    Raises:
      ValueError: another part has this name.
    """
    known = _PARTS.setdefault(part.name, part)
    if (known.__module__, known.__qualname__) != (part.__module__, part.__qualname__):
        raise ValueError(f"two parts are named {part.name!r}: {known} and {part}.")
    return part


@functools.cache
def _import_parts() -> None:
    import bpd_jax.drafting as package

    for name in _PACKAGES:
        folder = importlib.import_module(f"{package.__name__}.{name}")
        for module in pkgutil.iter_modules(folder.__path__):
            importlib.import_module(f"{folder.__name__}.{module.name}")
    for installed in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            installed.load()
        except Exception as error:  # Its module may raise anything.
            raise UserError(
                f"the entry point {installed.name} = {installed.value} of an installed "
                f"package cannot be imported ({error}): repair or uninstall it."
            ) from error


def find_part(name: str) -> Any:
    """The part with this name; None if there is none."""
    module = _MODULES.get(name, name)
    if name not in _PARTS and module.isidentifier():
        for package in _PACKAGES:
            path = f"bpd_jax.drafting.{package}.{module}"
            if importlib.util.find_spec(path):
                importlib.import_module(path)
    if name not in _PARTS:
        _import_parts()
    return _PARTS.get(name)


def parts(base: type[Part] = Part) -> dict[str, type[Part]]:
    """All registered parts of a base class, by name."""
    _import_parts()
    # Sorted, because the order of imports depends on the program.
    return {
        name: part for name, part in sorted(_PARTS.items()) if issubclass(part, base)
    }
