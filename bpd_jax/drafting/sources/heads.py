"""The block heads as a source: independent predictions of heads 2 … L."""

import abc
import dataclasses

import flax.struct
import jax.numpy as jnp

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import setting
from bpd_jax.base.typing import Array, Float, PyTree
from bpd_jax.drafting.draft_tree import take
from bpd_jax.drafting.interface import (
    Candidates,
    Extension,
    Outcome,
    Prompts,
    Source,
    View,
)
from bpd_jax.drafting.lattice import Lattice, build_lattice, distinct_scores
from bpd_jax.drafting.parts import (
    COUNT,
    BuildContext,
    SearchPart,
    SourcePart,
    register,
)


@flax.struct.dataclass
class LatticeState:
    """The lattice and the number of paths.

    Attributes:
      scores: log-probabilities of the candidates, -inf for repeated tokens.
      num_paths: n.
    """

    lattice: Lattice
    scores: Float[Array, "B L W"]
    num_paths: int = flax.struct.field(pytree_node=False, default=1)


class LatticeSource(Source):
    """Base of lattice sources, which define `build_lattice`."""

    offers_lattice: bool = True

    @abc.abstractmethod
    def build_lattice(
        self, view: View, arrays: PyTree, memory: PyTree
    ) -> tuple[Lattice, PyTree]:
        """The candidates of the block, and the memory."""

    def start(
        self, view: View, arrays: PyTree, memory: PyTree
    ) -> tuple[LatticeState, PyTree]:
        """Builds the lattice."""
        lattice, memory = self.build_lattice(view, arrays, memory)
        return LatticeState(lattice, distinct_scores(lattice)), memory

    def lattice(self, state: LatticeState) -> Lattice:
        return state.lattice

    def candidates(self, arrays: PyTree, state: LatticeState, level: int) -> Candidates:
        """The same candidates after every path."""
        tokens, scores = state.lattice.tokens[:, level], state.scores[:, level]
        shape = (tokens.shape[0], state.num_paths, tokens.shape[1])
        return Candidates(
            jnp.broadcast_to(tokens[:, None], shape),
            jnp.broadcast_to(scores[:, None], shape),
        )

    def extend(
        self, arrays: PyTree, state: LatticeState, level: int, extension: Extension
    ) -> LatticeState:
        """Updates the number of paths."""
        return dataclasses.replace(state, num_paths=extension.parents.shape[1])


@dataclasses.dataclass(frozen=True)
class HeadsSource(LatticeSource):
    """The W best tokens of each of heads 2 … L (Stern et al. 2018).

    Heads may also read outputs of layers (`BlockHeadsConfig.feature_layers`) at the
    last accepted token, which are the memory of the source.

    Attributes:
      block_size: L, the number of heads used.
      width: W, candidates per head (the paper's k).
      feature_layers: layers whose outputs the heads read.
    """

    block_size: int
    width: int
    feature_layers: tuple[int, ...] = ()

    def remember(self, arrays: PyTree, prompts: Prompts) -> Float[Array, "B F"] | None:
        """The outputs at the last token of each prompt."""
        if not self.feature_layers:
            return None
        return take(prompts.features, prompts.lengths[:, None] - 1)[:, 0]

    def learn(
        self, arrays: PyTree, memory: PyTree, outcome: Outcome
    ) -> Float[Array, "B F"] | None:
        """The outputs at the last accepted token."""
        if not self.feature_layers:
            return None
        last = take(outcome.features, outcome.count[:, None] - 1)[:, 0]
        return jnp.where((outcome.count > 0)[:, None], last, memory)

    def build_lattice(
        self, view: View, arrays: PyTree, memory: PyTree
    ) -> tuple[Lattice, PyTree]:
        """Evaluates the heads on the hidden state of the last token."""
        candidates = view.model.block_candidates(
            view.hidden,
            self.block_size,
            self.width,
            view.next_token,
            memory,
            view.noise,
        )
        return build_lattice(view.next_token, *candidates), memory


@register
@dataclasses.dataclass(frozen=True)
class Heads(SourcePart):
    """Settings of the source `heads`."""

    name = "heads"
    help = "the model's block heads"
    reference = "Stern et al. 2018"
    number_setting = "heads"
    offers_lattice = True
    is_heads = True

    heads: int | None = setting(
        None, "block heads used, head 1 included; default all", COUNT.or_none()
    )
    k: int | None = setting(
        None, "candidates per head; default lattice_width", COUNT.or_none()
    )

    def build(self, context: BuildContext, search: SearchPart) -> HeadsSource:
        available = context.model.block_size
        if available == 1:
            raise UserError(
                f"the model has no block heads, so method {context.method} has no "
                "lattice to draft from: train heads (BlockHeadsConfig), or use greedy, "
                "prompt_lookup, lookahead or draft_model."
            )
        if self.heads is not None and not 2 <= self.heads <= available:
            raise UserError(
                f"{context.method} asks for {self.heads} heads: give 2 to {available}."
            )
        block = min(self.heads or available, search.reach)
        choices = context.model.config.draft_vocab_size
        width = lattice_width(context, self.k, choices)
        check_paths(context, block, width, search)
        return HeadsSource(block, width, context.model.head_features)


def lattice_width(context: BuildContext, k: int | None, choices: int) -> int:
    """W of a lattice source.

    Args:
      choices: number of tokens to choose from.
    """
    width = k or context.width
    if width > choices:
        asks = f"asks for {k}" if k else f"would keep lattice_width = {width}"
        raise UserError(
            f"{context.method} {asks} candidates, but there are only {choices} tokens "
            f"to choose from: give the method k={choices} or less."
        )
    return width


def check_paths(
    context: BuildContext, block: int, width: int, search: SearchPart
) -> None:
    """Checks that the lattice has enough paths for the search."""
    paths = width ** (block - 1)
    if search.drafts > paths:
        raise UserError(
            f"{context.method} asks for {search.drafts} drafts, but the lattice of "
            f"{block} heads and {width} candidates has {paths} paths."
        )
