"""Models of draft paths: what may follow a path, and how likely it is.

A path begins with the certain token. A search (`bpd_jax.drafting.searches`) grows
paths level by level: it asks for the candidates that may follow each of its n paths,
picks some, and says so. Every source of drafts that can answer this takes part in every
search: the heads' lattice under any rescorer, sequential heads, a draft model.
"""

from typing import Protocol

import flax.struct

from bpd_jax.drafting.interface import View
from bpd_jax.typing import Array, Float, Int, PyTree


@flax.struct.dataclass
class Candidates:
    """W candidates for the next token of each of n paths, in no particular order.

    Attributes:
      tokens: ids.
      log_probs: natural logarithms; whole distributions need not sum to 1, and
        candidates that must not be used have -inf.
    """

    tokens: Int[Array, "B n W"]
    log_probs: Float[Array, "B n W"]


@flax.struct.dataclass
class Extension:
    """Which paths go on, and how: n old paths become m new ones.

    Attributes:
      parents: index of the old path.
      picks: index of the candidate among its W.
      tokens: that candidate.
    """

    parents: Int[Array, "B m"]
    picks: Int[Array, "B m"]
    tokens: Int[Array, "B m"]


class PathModel(Protocol):
    """Scores what may follow a path. Implementations are frozen, hence jit-static."""

    @property
    def block_size(self) -> int:
        """L: tokens of a path, the certain one included."""
        ...

    @property
    def width(self) -> int:
        """W: candidates that it offers after every path."""
        ...

    @property
    def arrays(self) -> PyTree:
        """What it reads on the device, or None; handed to every other method."""
        ...

    def remember(
        self, arrays: PyTree, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
    ) -> PyTree:
        """The memory before the first serial call; see `Drafter.start`."""
        ...

    def start(
        self, view: View, arrays: PyTree, memory: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The state of the one path that is the certain token; and the memory."""
        ...

    def candidates(self, arrays: PyTree, state: PyTree, level: int) -> Candidates:
        """What may follow each path.

        Args:
          arrays: `self.arrays`.
          state: of n paths of `level` tokens.
          level: 1 … L-1, the position in the block that is asked for.
        """
        ...

    def extend(
        self, arrays: PyTree, state: PyTree, level: int, extension: Extension
    ) -> PyTree:
        """The state of the new paths, whose last token is at position `level`."""
        ...

    def entropies(self, state: PyTree) -> Float[Array, "B L"] | None:
        """Entropies of the heads, where there are heads; of the first state."""
        ...
