"""Refinement of a block along its greedy path, before a search.

Refiners score candidates after a path. A search can request these scores for every
path that it grows, or refine the block first: Algorithm 2 walks greedily through the
block, and its scores of the k candidates of each position (the refined logits of the
paper, section 7.1) are then used after every path. A tree over them needs as many
passes of a small LM as Algorithm 2, each over a single path.
"""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp

from bpd_jax.drafting.draft_tree import take
from bpd_jax.drafting.interface import Candidates, Extension
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.typing import PyTree


@flax.struct.dataclass
class WalkState:
    """The state of the greedy path, which is used for n paths.

    Attributes:
      walk: state of the greedy path.
      num_paths: n.
    """

    walk: Any
    num_paths: int = flax.struct.field(pytree_node=False, default=1)


@dataclasses.dataclass(frozen=True)
class RefinedBlock:
    """`Paths` whose candidates after every path are those after the greedy path.

    Attributes:
      paths: source and refiners.
    """

    paths: Paths

    @property
    def block_size(self) -> int:
        """L."""
        return self.paths.block_size

    @property
    def width(self) -> int:
        """W."""
        return self.paths.width

    def candidates(self, arrays: PyTree, state: WalkState, level: int) -> Candidates:
        """The refined candidates of position `level`, the same after every path."""
        refined = self.paths.candidates(arrays, state.walk, level)
        shape = (refined.tokens.shape[0], state.num_paths, refined.tokens.shape[2])
        return Candidates(
            jnp.broadcast_to(refined.tokens, shape),
            jnp.broadcast_to(refined.log_probs, shape),
        )

    def extend(
        self, arrays: PyTree, state: WalkState, level: int, extension: Extension
    ) -> WalkState:
        """Extends the greedy path by its best candidate, for all paths."""
        refined = self.paths.candidates(arrays, state.walk, level)
        choices = jnp.argmax(refined.log_probs, axis=-1)
        tokens = take(refined.tokens[:, 0], choices)
        best = Extension(jnp.zeros_like(choices), choices, tokens)
        walk = self.paths.extend(arrays, state.walk, level, best)
        return WalkState(walk, extension.parents.shape[1])
