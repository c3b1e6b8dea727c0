"""A block drafter as a source, which predicts all positions in parallel."""

import dataclasses

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import setting
from bpd_jax.base.typing import Params, PyTree
from bpd_jax.drafting.assets import AttachedDrafter
from bpd_jax.drafting.interface import Outcome, Prompts, View
from bpd_jax.drafting.lattice import Lattice, build_lattice
from bpd_jax.drafting.parts import (
    COUNT,
    BuildContext,
    SearchPart,
    SourcePart,
    register,
)
from bpd_jax.drafting.sources.heads import LatticeSource, check_paths, lattice_width
from bpd_jax.models.drafter_functions import DrafterFunctions


@dataclasses.dataclass(frozen=True)
class BlockSource(LatticeSource):
    """The W best tokens of each position of a block drafter (DFlash, DSpark, DFlash2).

    Its memory is the drafter's cache of the accepted tokens.

    Attributes:
      block_size: L, at most that of the drafter.
      width: W.
      feature_layers: layers of the model whose states it reads.
    """

    block_size: int
    width: int
    functions: DrafterFunctions
    feature_layers: tuple[int, ...] = dataclasses.field()
    arrays: Params = dataclasses.field(compare=False)

    is_block_drafter = True

    def remember(self, arrays: Params, prompts: Prompts) -> PyTree:
        """Reads the prompts."""
        length = prompts.tokens.shape[1]
        return self.functions.prefill(arrays, prompts.features, prompts.lengths, length)

    def learn(self, arrays: Params, memory: PyTree, outcome: Outcome) -> PyTree:
        """Appends the accepted tokens to the cache."""
        return self.functions.append(arrays, memory, outcome.features, outcome.count)

    def build_lattice(
        self, view: View, arrays: Params, memory: PyTree
    ) -> tuple[Lattice, PyTree]:
        """Predicts the tokens after the certain token."""
        # A recorded drafter reads no layers, and a recorded model has no embeddings.
        anchors = view.next_token
        if self.feature_layers:
            anchors = view.model.embed(view.next_token)
        candidates = self.functions.candidates(
            arrays, memory, anchors, self.block_size - 1, self.width, view.noise
        )
        return build_lattice(view.next_token, *candidates), memory


@register
@dataclasses.dataclass(frozen=True)
class Block(SourcePart):
    """Settings of the source `block`."""

    name = "block"
    title = "block drafter"
    help = "a block drafter that reads the model's states"
    reference = "DFlash 2026; DSpark 2026; DFlash2 2026"
    number_setting = "length"
    needs = ("drafter",)
    offers_lattice = True

    length: int | None = setting(
        None,
        "tokens of the block, including the certain token",
        COUNT.or_none(),
    )
    k: int | None = setting(
        None, "candidates per position; default lattice_width", COUNT.or_none()
    )

    def build(self, context: BuildContext, search: SearchPart) -> BlockSource:
        drafter: AttachedDrafter = context.need("drafter")
        config = drafter.functions.config
        if self.length is not None and not 2 <= self.length <= config.block_size:
            raise UserError(
                f"the block length of {context.method} is {self.length}, and must be "
                f"from 2 to {config.block_size}."
            )
        length = min(self.length or config.block_size, search.reach)
        choices = config.draft_vocabulary or context.vocab_size
        width = lattice_width(context, self.k, choices)
        check_paths(context, length, width, search)
        return BlockSource(
            length, width, drafter.functions, drafter.feature_layers, drafter.params
        )
