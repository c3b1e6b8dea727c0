"""A block drafter as a source: the candidates of a whole block in one pass.

Its memory is a cache of the accepted tokens (`models.context_cache`), which takes the
states of the model's layers along the accepted path after every call.
"""

import dataclasses
from typing import ClassVar

from bpd_jax.drafting.interface import Outcome, Prompts, View
from bpd_jax.drafting.lattice import Lattice, build_lattice
from bpd_jax.drafting.parts import COUNT, BuildContext, SearchPart, SourcePart
from bpd_jax.drafting.sources.heads import LatticeSource, check_paths, lattice_width
from bpd_jax.errors import UserError
from bpd_jax.models.cache import KVCache
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.settings import setting
from bpd_jax.typing import Params


@dataclasses.dataclass(frozen=True)
class BlockSource(LatticeSource):
    """The W best tokens of positions 1 … L-1 (DFlash, DSpark).

    Attributes:
      functions: of the block drafter.
      block_size: L, the positions that are used.
      width: W, candidates per position.
      arrays: parameters of the block drafter, with the softmax.
    """

    functions: DrafterFunctions
    block_size: int
    width: int
    arrays: Params = dataclasses.field(compare=False)

    @property
    def feature_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        """Layers of the model that the block drafter reads."""
        return self.functions.config.feature_layers

    def remember(self, arrays: Params, prompts: Prompts) -> KVCache:
        """Projects the prompts, as far as the window reaches back."""
        assert prompts.features is not None
        length = prompts.tokens.shape[1]
        return self.functions.prefill(arrays, prompts.features, prompts.lengths, length)

    def build_lattice(
        self, view: View, arrays: Params, memory: KVCache
    ) -> tuple[Lattice, KVCache]:
        """Runs the block drafter on the certain token and its context."""
        anchors = view.model.embed(view.next_token)
        candidates = self.functions.candidates(arrays, memory, anchors, self.width)
        used = (part[:, : self.block_size - 1] for part in candidates)
        return build_lattice(view.next_token, *used), memory

    def learn(self, arrays: Params, memory: KVCache, outcome: Outcome) -> KVCache:
        """Appends the accepted tokens."""
        assert outcome.features is not None
        return self.functions.append(arrays, memory, outcome.features, outcome.count)


@dataclasses.dataclass(frozen=True)
class Block(SourcePart):
    """Settings of the source `block`."""

    name: ClassVar[str] = "block"
    help: ClassVar[str] = "a block drafter, which reads the states of several layers"
    reference: ClassVar[str] = "DFlash, arXiv 2602.06036"
    number: ClassVar[str] = "tokens"
    needs: ClassVar[tuple[str, ...]] = ("drafter",)
    needs_hidden: ClassVar[bool] = True
    offers_lattice: ClassVar[bool] = True

    tokens: int | None = setting(
        None,
        "tokens of a block, the certain one included; default all",
        COUNT.or_none(),
    )
    k: int | None = setting(
        None, "candidates per position; default lattice_width", COUNT.or_none()
    )

    def build(self, context: BuildContext, search: SearchPart) -> BlockSource:
        """Makes the source.

        Raises:
          UserError: there is no block drafter, its block is shorter, or its vocabulary
            smaller.
        """
        functions, params = context.need("drafter")
        available = functions.config.block_size
        if self.tokens is not None and not 2 <= self.tokens <= available:
            raise UserError(
                f"{context.method} asks for blocks of {self.tokens} tokens: give 2 to "
                f"{available}."
            )
        block = self.tokens or available
        width = lattice_width(context, self.k, len(params["softmax"]))
        check_paths(context, block, width, search)
        return BlockSource(functions, block, width, params)

    def label(self, order: int | None = None) -> str:
        """What people read in tables."""
        del order
        return "Block drafter"
