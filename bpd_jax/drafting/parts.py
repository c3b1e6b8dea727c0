"""The parts that drafting methods are composed of, and their registry.

A part is a frozen dataclass in `sources/`, `refiners/` or `searches/`: its fields are
its settings, its class variables say what `--method=help` prints, and `build` makes the
object that drafts. `@register` enters it under its name. Every module of the three
packages is imported when the registry is first read, so that adding a part means adding
one file; `register` may also be called on a class defined elsewhere.
"""

import abc
import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from bpd_jax.drafting.assets import Assets
from bpd_jax.drafting.interface import Drafter, Refiner, Search, Source
from bpd_jax.drafting.path_drafter import PathDrafter
from bpd_jax.drafting.paths import Paths
from bpd_jax.drafting.refiners.transitions import FiniteRefiner
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.settings import changed_settings, check_settings, integer

# A larger number of drafts or nodes in one serial call is taken for a typing error.
MOST_DRAFTS = 1024
COUNT = integer(1, MOST_DRAFTS)

DRAFTS, NODES, TOKENS = "drafts", "nodes", "tokens"


@dataclasses.dataclass(frozen=True)
class BuildContext:
    """What parts are built from.

    Attributes:
      model: functions of the model.
      assets: n-gram models, small models and trained refiners.
      width: W, candidates per position where a source does not say.
      alpha: weight of a refiner that does not say.
      method: the name of the whole method, for messages.
      temperature: of drawn drafts, for speculative sampling; None draws nothing.
      reach: upper bound of the tokens that one serial call accepts from other sources.
      shared: what parts of several methods share, by a key of their choice.
    """

    model: ModelFunctions
    assets: Assets
    width: int
    alpha: float
    method: str = ""
    temperature: float | None = None
    reach: int = 1
    shared: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """V of the model."""
        return self.model.config.trunk.vocab_size

    def need(self, asset: str) -> Any:
        """Returns an asset, or raises a `UserError` that says how to make it."""
        return self.assets.need(asset, self.method)

    def share(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once for all methods of a decoder."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


@dataclasses.dataclass(frozen=True)
class Part:
    """Base of all parts; see the module.

    Class variables:
      name: in a method.
      help: one line.
      reference: publication.
      number: the setting that a number after the name sets, as in `tree:32`, or "".
      needs: assets without which it cannot be built.
      needs_hidden: whether it reads the model's hidden states themselves, which a
        recording keeps only on request.
      needs_model: whether it asks the model about other texts, which a recording
        cannot answer.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    reference: ClassVar[str] = "bpd_jax"
    number: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    needs_hidden: ClassVar[bool] = False
    needs_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_settings(self, f"{self.name}: ")

    @property
    def text(self) -> str:
        """As it is written in a method."""
        words = [self.name]
        if self.number:
            words.append(str(getattr(self, self.number)))
        words += [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in changed_settings(self)
            if name != self.number
        ]
        if self.number and getattr(self, self.number) is None:
            del words[1]
        return ":".join(words)

    def label(self, order: int | None = None) -> str:
        """What people read in tables.

        Args:
          order: of the n-gram model, if there is one.
        """
        del order
        return self.name


@dataclasses.dataclass(frozen=True)
class SourcePart(Part, abc.ABC):
    """A source of candidates that a search grows drafts from.

    Class variables:
      offers_lattice: whether candidates do not depend on the path.
      default_search: where a method names none.
    """

    offers_lattice: ClassVar[bool] = False
    default_search: ClassVar[str] = "greedy"

    @abc.abstractmethod
    def build(self, context: BuildContext, search: "SearchPart") -> Source:
        """Makes the source, for a search."""


@dataclasses.dataclass(frozen=True)
class StandalonePart(Part, abc.ABC):
    """A source that is a complete drafter: it takes neither refiners nor a search."""

    @abc.abstractmethod
    def build(self, context: BuildContext) -> Drafter:
        """Makes the drafter."""


@dataclasses.dataclass(frozen=True)
class RefinerPart(Part, abc.ABC):
    """A refiner of a source's candidates.

    Class variables:
      finite: whether `build` returns a `FiniteRefiner`, which needs a lattice.
      normalised: whether it was trained as a distribution after every token, so that
        scores are normalised unless the search says otherwise.
    """

    finite: ClassVar[bool] = False
    normalised: ClassVar[bool] = False

    @property
    def is_finite(self) -> bool:
        """`finite`, where it depends on the settings too."""
        return self.finite

    @abc.abstractmethod
    def build(self, context: BuildContext, source: Source) -> Refiner | FiniteRefiner:
        """Makes the refiner."""


@dataclasses.dataclass(frozen=True)
class SearchPart(Part, abc.ABC):
    """A search for the drafts.

    Class variables:
      counts: what its number counts, `DRAFTS` or `NODES`; "" without a number.
    """

    counts: ClassVar[str] = ""

    @property
    def drafts(self) -> int:
        """Paths that the lattice must have."""
        return 1

    @abc.abstractmethod
    def drafter(
        self,
        context: BuildContext,
        source: Source,
        refiners: tuple[RefinerPart, ...],
    ) -> Drafter:
        """Joins source, refiners and search."""


@dataclasses.dataclass(frozen=True)
class GrowingPart(SearchPart):
    """A search that grows drafts from paths, inside the loop."""

    @abc.abstractmethod
    def build(self, context: BuildContext, paths: Paths, normalise: bool) -> Search:
        """Makes the search.

        Args:
          context: of the method.
          paths: what it will grow drafts from.
          normalise: whether the refiners were trained as distributions.
        """

    def drafter(
        self,
        context: BuildContext,
        source: Source,
        refiners: tuple[RefinerPart, ...],
    ) -> Drafter:
        """Joins source, refiners and search."""
        finite: list[Any] = []
        others: list[Any] = []
        for part in refiners:
            (finite if part.is_finite else others).append(part.build(context, source))
        paths = Paths(source, tuple(finite), tuple(others))
        normalise = any(part.normalised for part in refiners)
        return PathDrafter(paths, self.build(context, paths, normalise))


_PARTS: dict[str, type[Part]] = {}
_PACKAGES = ("sources", "refiners", "searches")
_PartType = TypeVar("_PartType", bound=type[Part])


def register(part: _PartType) -> _PartType:
    """Enters a part under its name; a class decorator.

    Raises:
      ValueError: another part has that name.
    """
    known = _PARTS.setdefault(part.name, part)
    if (known.__module__, known.__qualname__) != (part.__module__, part.__qualname__):
        raise ValueError(f"two parts are called {part.name!r}: {known} and {part}.")
    return part


@functools.cache
def _import_parts() -> None:
    import bpd_jax.drafting as package

    for name in _PACKAGES:
        folder = importlib.import_module(f"{package.__name__}.{name}")
        for module in pkgutil.iter_modules(folder.__path__):
            importlib.import_module(f"{folder.__name__}.{module.name}")


def parts(base: type[Part] = Part) -> dict[str, type[Part]]:
    """All registered parts of a kind, by name."""
    _import_parts()
    # By name, because the order of imports depends on the program.
    return {
        name: part for name, part in sorted(_PARTS.items()) if issubclass(part, base)
    }
