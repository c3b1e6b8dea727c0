"""Static trees, with a fixed shape in terms of ranks (Medusa, Cai et al. 2024)."""

import dataclasses
import functools
import heapq
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.settings import choice, setting
from bpd_jax.base.typing import Array, Int, PyTree
from bpd_jax.drafting.draft_tree import DraftTree, NodeOrigins, take
from bpd_jax.drafting.interface import Candidates, Extension, Search
from bpd_jax.drafting.parts import (
    COUNT,
    DRAFTS,
    NODES,
    BuildContext,
    GrowingPart,
    SourcePart,
    register,
)
from bpd_jax.drafting.path_drafter import Paths
from bpd_jax.drafting.searches.growth import normalised


@dataclasses.dataclass(frozen=True)
class Topology:
    """The shape of a tree: each node is the tuple of ranks on its path.

    `(0, 2)` is the third best candidate after the best candidate after the certain
    token. The root, `()`, is the certain token and is not listed.

    Attributes:
      choices: the nodes, sorted by length and ranks; see `of`.
    """

    choices: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, choices: Sequence[tuple[int, ...]]) -> "Topology":
        """Sorts `choices`; each follows from its parent, and from rank 0 on."""
        return cls(tuple(sorted(choices, key=lambda node: (len(node), node))))

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path, including the certain token."""
        return 1 + max((len(node) for node in self.choices), default=0)

    @property
    def num_leaves(self) -> int:
        """Number of leaves."""
        inner = {node[:-1] for node in self.choices}
        return max(sum(node not in inner for node in self.choices), 1)

    def within(self, block_size: int, width: int) -> "Topology":
        """The nodes within a lattice of L positions and W candidates."""
        fitting = (n for n in self.choices if len(n) < block_size and max(n) < width)
        return Topology(tuple(fitting))


@dataclasses.dataclass(frozen=True)
class StaticTree(Search):
    """A tree of fixed shape, filled with candidates by rank.

    With a temperature, the children of each node are sampled without replacement, for
    speculative sampling; otherwise they are the best candidates.

    Attributes:
      temperature: temperature of sampling, or None for the best candidates.
      refine_block: whether to refine the block along its greedy path first
        (Algorithm 2), and to rank the candidates of each position after every path by
        these scores, the refined logits of the paper's section 7.1. A tree over them
        needs as many passes of a small LM as Algorithm 2, each over a single path.
    """

    topology: Topology
    temperature: float | None = None
    refine_block: bool = False

    def max_nodes(self, block_size: int, width: int) -> int:
        """Number of nodes, including the certain token."""
        return 1 + len(self.topology.within(block_size, width).choices)

    def max_drafts(self, block_size: int, width: int) -> int:
        """Number of leaves."""
        return self.topology.within(block_size, width).num_leaves

    @property
    def draws(self) -> bool:
        """Whether there is a temperature."""
        return self.temperature is not None

    def grow(
        self,
        paths: Paths,
        arrays: PyTree,
        state: PyTree,
        first: Int[Array, " B"],
        key: Array | None = None,
    ) -> DraftTree:
        """Returns the tree; ranks are the indices of the nodes.

        See `Search`; `key` is required with a temperature.
        """
        batch, width = first.shape[0], paths.width
        topology = self.topology.within(paths.block_size, width)
        tokens, valid = [first[:, None]], [jnp.ones((batch, 1), bool)]
        parents, sources = [-1], []
        index: dict[tuple[int, ...], int] = {(): 0}
        before: list[tuple[int, ...]] = [()]
        for level in range(1, topology.depth):
            nodes = [node for node in topology.choices if len(node) == level]
            candidates = paths.candidates(arrays, state, level)
            if self.refine_block:  # The same candidates after every path.
                shape = (batch, len(before), width)
                walk = jnp.argmax(candidates.log_probs, axis=-1)
                candidates = Candidates(
                    jnp.broadcast_to(candidates.tokens, shape),
                    jnp.broadcast_to(candidates.log_probs, shape),
                )
            scores = normalised(candidates.log_probs)
            if self.temperature is not None:
                assert key is not None
                scores, log_probs = _perturbed(scores, self.temperature, key, level)
                sources.append(NodeOrigins(candidates.tokens, log_probs))
            _, ranked = jax.lax.top_k(scores, 1 + max(node[-1] for node in nodes))
            row = np.array([before.index(node[:-1]) for node in nodes])
            picks = ranked[:, row, np.array([node[-1] for node in nodes])]
            flat = row * width + picks
            chosen = take(candidates.tokens.reshape(batch, -1), flat)
            tokens.append(chosen)
            valid.append(jnp.isfinite(take(scores.reshape(batch, -1), flat)))
            for node in nodes:
                parents.append(index[node[:-1]])
                index[node] = len(index)
            if level + 1 < topology.depth:
                extension = Extension(
                    jnp.broadcast_to(jnp.asarray(row), chosen.shape), picks, chosen
                )
                if self.refine_block:  # The greedy path, by its best candidate.
                    best = take(candidates.tokens[:, 0], walk)
                    extension = Extension(jnp.zeros_like(walk), walk, best)
                state = paths.extend(arrays, state, level, extension)
            before = nodes
        size = len(parents)
        depths = [0] + [len(node) for node in topology.choices]

        def per_row(values: Sequence[int]) -> Array:
            return jnp.broadcast_to(jnp.asarray(values, jnp.int32), (batch, size))

        alive = jnp.concatenate(valid, axis=1)
        for child in range(1, size):  # Children of invalid nodes are invalid.
            alive = alive.at[:, child].set(alive[:, child] & alive[:, parents[child]])
        return DraftTree(
            tokens=jnp.concatenate(tokens, axis=1),
            parents=per_row(parents),
            depths=per_row(depths),
            ranks=per_row(range(size)),
            valid=alive,
            sources=_all_nodes(sources, size) if sources else None,
            num_chains=1 if topology.num_leaves == 1 else 0,
        )


def _perturbed(
    log_probs: Array, temperature: float, key: Array, level: int
) -> tuple[Array, Array]:
    """Scores whose order samples without replacement (Gumbel top-k); distributions."""
    log_probs = jax.nn.log_softmax(log_probs / temperature, axis=-1)
    log_probs = jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)

    def noise(row_key: Array) -> Array:
        return jax.random.gumbel(
            jax.random.fold_in(row_key, level), log_probs.shape[1:]
        )

    return log_probs + jax.vmap(noise)(key), log_probs


def _all_nodes(sources: list[NodeOrigins], size: int) -> NodeOrigins:
    """Joins the sources of the levels; nodes of the last level have none."""

    def joined(*levels: Array) -> Array:
        array = jnp.concatenate(levels, axis=1)
        return jnp.pad(array, ((0, 0), (0, size - array.shape[1]), (0, 0)))

    return jax.tree.map(joined, *sources)


@functools.cache
def expected_tree(
    accuracies: tuple[tuple[float, ...], ...], num_nodes: int
) -> Topology:
    """The tree with the highest expected number of accepted tokens (Medusa, 2.3.3).

    Heads are assumed to be independent: the probability of a node is the product of the
    accuracies of its ranks. Nodes are added in decreasing order of probability, which
    gives the best tree of every size.

    Args:
      accuracies: `accuracies[j][r]` is the share of right candidates of rank r of head
        j + 2.
      num_nodes: M, number of nodes including the certain token.
    """
    heap: list[tuple[float, tuple[int, ...]]] = []

    def push(probability: float, node: tuple[int, ...]) -> None:
        """Adds a node to the queue; its sibling and child follow when it is chosen."""
        if len(node) <= len(accuracies) and node[-1] < len(accuracies[len(node) - 1]):
            gain = probability * accuracies[len(node) - 1][node[-1]]
            heapq.heappush(heap, (-gain, node))

    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    push(1.0, (0,))
    while heap and len(probabilities) < num_nodes:
        gain, node = heapq.heappop(heap)
        probabilities[node] = -gain
        push(probabilities[node[:-1]], (*node[:-1], node[-1] + 1))
        push(-gain, (*node, 0))
    return Topology.of([node for node in probabilities if node])


def parallel_chains(count: int, length: int) -> Topology:
    """`count` distinct first draft tokens, each continued by a chain.

    Worked example, `parallel_chains(2, 3)`: (0), (0 0), (0 0 0), (1), (1 0), (1 0 0).
    """
    return Topology.of(
        [
            (first, *[0] * (depth - 1))
            for first in range(count)
            for depth in range(1, length + 1)
        ]
    )


# Default accuracies of rank r; those of head j + 2 are raised to the power sqrt(j + 1).
# They only determine the shape of a tree.
_TYPICAL_ACCURACIES = (0.5, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01)


def typical_accuracies(block_size: int) -> tuple[tuple[float, ...], ...]:
    """Default accuracies by head and rank, without measured ones."""
    return tuple(
        tuple(share ** ((head + 1) ** 0.5) for share in _TYPICAL_ACCURACIES)
        for head in range(block_size - 1)
    )


PATH, BLOCK = ORDERS = ("path", "block")


@register
@dataclasses.dataclass(frozen=True)
class Static(GrowingPart):
    """Settings of the search `static`."""

    name = "static"
    title = "Medusa tree of {nodes}"
    help = "a tree of M nodes whose shape is fixed in advance"
    reference = "Cai et al. 2024 (Medusa)"
    number_setting = "nodes"
    counts = NODES
    of_heads = ""
    joint = ", "

    nodes: int = setting(32, "nodes M, the certain token included", COUNT)
    order: str = setting(
        PATH,
        "path ranks candidates by their refined scores after each path, block by those "
        "after the greedy path, so that the block is refined once",
        choice(*ORDERS),
    )

    def build(self, context: BuildContext, paths: Paths, normalise: bool) -> StaticTree:
        """Builds the search; its shape depends on the accuracies of the heads."""
        accuracies = context.assets.accuracies or typical_accuracies(paths.block_size)
        topology = expected_tree(accuracies, self.nodes)
        return StaticTree(topology, context.temperature, self.order == BLOCK)


@register
@dataclasses.dataclass(frozen=True)
class Chains(GrowingPart):
    """Settings of the search `chains`."""

    name = "chains"
    title = "{paths} chains"
    help = "P greedy paths that begin with different tokens"
    reference = "Leviathan et al. 2023"
    number_setting = "paths"
    counts = DRAFTS

    paths: int = setting(1, "paths P", COUNT)

    def label_with(
        self, source: SourcePart, refiners: str, order: int | None = None
    ) -> str:
        """The source comes first, and several chains last."""
        chains = self.label(order) if self.paths > 1 else ""
        parts = (source.label(order), refiners, chains)
        return ", ".join(part for part in parts if part)

    def build(self, context: BuildContext, paths: Paths, normalise: bool) -> StaticTree:
        topology = parallel_chains(self.paths, paths.block_size - 1)
        return StaticTree(topology, context.temperature)
