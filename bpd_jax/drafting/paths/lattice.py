"""Paths through the heads' lattice, with a transition scorer as second opinion."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.drafting.interface import View
from bpd_jax.drafting.lattice import Drafts, Lattice, best_drafts
from bpd_jax.drafting.paths.interface import Candidates, Extension
from bpd_jax.drafting.transitions.exact import best_paths, distinct_scores
from bpd_jax.drafting.transitions.interface import Transitions, TransitionScorer
from bpd_jax.drafting.tree import take
from bpd_jax.typing import Array, Float, Int, PyTree


@flax.struct.dataclass
class LatticeState:
    """Where n paths stand in the lattice.

    Attributes:
      lattice: the candidates.
      scores: of the candidates, with repeated ones at -inf.
      transitions: the second opinion, or None.
      nodes: of each path; without second opinion all are 0.
    """

    lattice: Lattice
    scores: Float[Array, "B L W"]
    transitions: Transitions | None
    nodes: Int[Array, "B n"]


@dataclasses.dataclass(frozen=True)
class LatticePaths:
    """Candidates of heads 2 … L, scored by log p_head + transition scores.

    Attributes:
      block_size: L.
      width: W, candidates of a head (the paper's k).
      scorer: the second opinion, or None for the heads alone.
      normalise: whether scores are normalised among the candidates after every node, so
        that a path's score says how probable it is. Refiners that were trained as
        distributions after every token want it; the paper's sums of log-probabilities
        do without.
    """

    block_size: int
    width: int
    scorer: TransitionScorer | None = None
    normalise: bool = False

    @property
    def arrays(self) -> PyTree:
        """Those of the scorer."""
        return None if self.scorer is None else self.scorer.arrays

    def remember(
        self, arrays: PyTree, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
    ) -> PyTree:
        """Nothing: all there is to know stands in the text."""
        del arrays, tokens, lengths

    def start(
        self, view: View, arrays: PyTree, memory: PyTree
    ) -> tuple[LatticeState, PyTree]:
        """Builds the lattice and scores its steps."""
        lattice = view.model.lattice(
            view.hidden, view.next_token, self.block_size, self.width
        )
        transitions, nodes = None, jnp.zeros_like(view.next_token)
        if self.scorer is not None:
            transitions = self.scorer.transitions(arrays, lattice, view)
            if self.normalise:
                transitions = _normalised(lattice, transitions)
            nodes = transitions.start
        state = LatticeState(
            lattice, distinct_scores(lattice), transitions, nodes[:, None]
        )
        return state, memory

    def candidates(self, arrays: PyTree, state: LatticeState, level: int) -> Candidates:
        """The head's candidates under both opinions."""
        del arrays
        scores = state.scores[:, level, None]
        if state.transitions is not None:
            scores = scores + take(state.transitions.scores[:, level - 1], state.nodes)
        shape = (*state.nodes.shape, self.width)
        tokens = jnp.broadcast_to(state.lattice.tokens[:, level, None], shape)
        return Candidates(tokens, jnp.broadcast_to(scores, shape))

    def extend(
        self, arrays: PyTree, state: LatticeState, level: int, extension: Extension
    ) -> LatticeState:
        """Follows the steps to their nodes."""
        del arrays
        nodes = jnp.zeros_like(extension.picks)
        if state.transitions is not None:
            following = state.transitions.following[:, level - 1]
            flat = take(state.nodes, extension.parents) * self.width + extension.picks
            nodes = take(following.reshape(following.shape[0], -1), flat)
        return dataclasses.replace(state, nodes=nodes)

    def entropies(self, state: LatticeState) -> Float[Array, "B L"]:
        """Of the heads."""
        return state.lattice.entropies

    def best(self, state: LatticeState, num_drafts: int) -> Drafts:
        """The P best drafts of all W^(L-1), exactly."""
        if state.transitions is None:
            return best_drafts(state.lattice, num_drafts)
        return best_paths(state.lattice, state.transitions, num_drafts)


def _normalised(lattice: Lattice, transitions: Transitions) -> Transitions:
    """Adds to the scores what makes the candidates after a node sum to 1."""
    heads = distinct_scores(lattice)[:, 1:, None]
    total = jax.nn.logsumexp(heads + transitions.scores, axis=-1, keepdims=True)
    return dataclasses.replace(transitions, scores=transitions.scores - total)
