"""Static trees: which ranks of candidates follow which (Medusa, Cai et al. 2024)."""

import dataclasses
import functools
import heapq
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.drafting.interface import Extension, Search
from bpd_jax.drafting.parts import (
    COUNT,
    DRAFTS,
    NODES,
    BuildContext,
    GrowingPart,
    register,
)
from bpd_jax.drafting.paths import Paths
from bpd_jax.drafting.refined_block import RefinedBlock, RefineFirst
from bpd_jax.drafting.searches.growth import normalised
from bpd_jax.drafting.tree import DraftTree, Sources, take
from bpd_jax.errors import UserError
from bpd_jax.settings import choice, setting
from bpd_jax.typing import Array, Int, PyTree


@dataclasses.dataclass(frozen=True)
class Topology:
    """The shape of a tree: each node as the ranks that lead to it from the root.

    `(0, 2)` is the third best candidate after the best candidate after the certain
    token. The certain token itself, `()`, is always there and is not listed.

    Attributes:
      choices: the nodes, parents before children and siblings by rank, as `of` makes
        them.
    """

    choices: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, choices: Sequence[Sequence[int]]) -> "Topology":
        """Sorts `choices`.

        Raises:
          UserError: a node comes twice, has a negative rank, no parent, or no sibling
            of the rank before: candidates are taken, or drawn, in order.
        """
        nodes = sorted((tuple(node) for node in choices), key=lambda n: (len(n), n))
        known: set[tuple[int, ...]] = {()}
        for node in nodes:
            if not node or node in known or min(node) < 0:
                raise UserError(
                    f"the tree's node {list(node)} is empty, repeated or negative."
                )
            if node[:-1] not in known:
                raise UserError(f"the tree's node {list(node)} has no parent.")
            if node[-1] > 0 and (*node[:-1], node[-1] - 1) not in known:
                raise UserError(
                    f"the tree's node {list(node)} has no sibling of rank "
                    f"{node[-1] - 1}: ranks must follow each other from 0."
                )
            known.add(node)
        return cls(tuple(nodes))

    @property
    def depth(self) -> int:
        """Tokens of the longest path, the certain one included."""
        return 1 + max((len(node) for node in self.choices), default=0)

    @property
    def num_leaves(self) -> int:
        """Paths from the root to a leaf."""
        inner = {node[:-1] for node in self.choices}
        return max(sum(node not in inner for node in self.choices), 1)

    def within(self, block_size: int, width: int) -> "Topology":
        """The part that a lattice of L positions and W candidates can fill."""
        return Topology(
            tuple(
                node
                for node in self.choices
                if len(node) < block_size and max(node) < width
            )
        )


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """Fills a topology with the candidates that the path model ranks so.

    With a temperature the children of each node are drawn from the candidates without
    replacement, for speculative sampling; without one they are the best.

    Attributes:
      topology: the shape.
      temperature: of the draws, or None to take the best.
    """

    topology: Topology
    temperature: float | None = None

    def max_nodes(self, block_size: int, width: int) -> int:
        """Nodes, the certain token included."""
        return 1 + len(self.topology.within(block_size, width).choices)

    def max_drafts(self, block_size: int, width: int) -> int:
        """Leaves."""
        return self.topology.within(block_size, width).num_leaves

    @property
    def draws(self) -> bool:
        """With a temperature."""
        return self.temperature is not None

    def grow(
        self,
        paths: Paths | RefinedBlock,
        arrays: PyTree,
        state: PyTree,
        first: Int[Array, " B"],
        key: Array | None = None,
    ) -> DraftTree:
        """Returns the tree; ranks are the order of the nodes.

        Args:
          paths: source and refiners.
          arrays: its arrays.
          state: its first state.
          first: the certain token.
          key: one random key per row, needed with a temperature.
        """
        batch, width = first.shape[0], paths.width
        topology = self.topology.within(paths.block_size, width)
        tokens, valid = [first[:, None]], [jnp.ones((batch, 1), bool)]
        parents, sources = [-1], []
        index: dict[tuple[int, ...], int] = {(): 0}
        before: list[tuple[int, ...]] = [()]
        for level in range(1, topology.depth):
            nodes = [node for node in topology.choices if len(node) == level]
            offered = paths.candidates(arrays, state, level)
            scores = normalised(offered)
            if self.temperature is not None:
                assert key is not None
                scores, drawn = _perturbed(scores, self.temperature, key, level)
                sources.append(Sources(offered.tokens, drawn))
            _, ranked = jax.lax.top_k(scores, 1 + max(node[-1] for node in nodes))
            row = np.array([before.index(node[:-1]) for node in nodes])
            picks = ranked[:, row, np.array([node[-1] for node in nodes])]
            flat = row * width + picks
            chosen = take(offered.tokens.reshape(batch, -1), flat)
            tokens.append(chosen)
            valid.append(jnp.isfinite(take(scores.reshape(batch, -1), flat)))
            for node in nodes:
                parents.append(index[node[:-1]])
                index[node] = len(index)
            if level + 1 < topology.depth:
                extension = Extension(
                    jnp.broadcast_to(jnp.asarray(row), chosen.shape), picks, chosen
                )
                state = paths.extend(arrays, state, level, extension)
            before = nodes
        size = len(parents)
        depths = [0] + [len(node) for node in topology.choices]

        def per_row(values: Sequence[int]) -> Array:
            return jnp.broadcast_to(jnp.asarray(values, jnp.int32), (batch, size))

        alive = jnp.concatenate(valid, axis=1)
        for child in range(1, size):  # what follows an impossible node is so too
            alive = alive.at[:, child].set(alive[:, child] & alive[:, parents[child]])
        return DraftTree(
            tokens=jnp.concatenate(tokens, axis=1),
            parents=per_row(parents),
            depths=per_row(depths),
            ranks=per_row(range(size)),
            valid=alive,
            sources=_padded(sources, size, batch, width) if sources else None,
            num_chains=1 if topology.num_leaves == 1 else 0,
        )


def _perturbed(
    log_probs: Array, temperature: float, key: Array, level: int
) -> tuple[Array, Array]:
    """Scores whose order draws without replacement (Gumbel top-k), and their source."""
    log_probs = jax.nn.log_softmax(log_probs / temperature, axis=-1)
    log_probs = jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)

    def noise(row_key: Array) -> Array:
        return jax.random.gumbel(
            jax.random.fold_in(row_key, level), log_probs.shape[1:]
        )

    return log_probs + jax.vmap(noise)(key), log_probs


def _padded(sources: list[Sources], size: int, batch: int, width: int) -> Sources:
    """Sources of all nodes, in the order of levels; the last nodes have none."""
    joined = jax.tree.map(lambda *levels: jnp.concatenate(levels, axis=1), *sources)
    missing = size - joined.tokens.shape[1]
    return jax.tree.map(
        lambda array: jnp.pad(array, ((0, 0), (0, missing), (0, 0))), joined
    )


@functools.cache
def expected_tree(
    accuracies: tuple[tuple[float, ...], ...], num_nodes: int
) -> Topology:
    """The tree of the most expected accepted tokens (Medusa, section 2.3.3).

    Heads are taken as independent: a node is right with the product of the accuracies
    of its ranks. Greedily the node of the highest such chance is added, which is the
    best tree of that size.

    Args:
      accuracies: `accuracies[j][r]` is how often the candidate of rank r of head j + 2
        is the right token.
      num_nodes: M, the certain token included.
    """
    heap: list[tuple[float, tuple[int, ...]]] = []

    def push(chance: float, node: tuple[int, ...]) -> None:
        """Queues a node: its next sibling and its first child wait for it."""
        if len(node) <= len(accuracies) and node[-1] < len(accuracies[len(node) - 1]):
            gain = chance * accuracies[len(node) - 1][node[-1]]
            heapq.heappush(heap, (-gain, node))

    chances: dict[tuple[int, ...], float] = {(): 1.0}
    push(1.0, (0,))
    while heap and len(chances) < num_nodes:
        gain, node = heapq.heappop(heap)
        chances[node] = -gain
        push(chances[node[:-1]], (*node[:-1], node[-1] + 1))
        push(-gain, (*node, 0))
    return Topology.of([node for node in chances if node])


def parallel_chains(count: int, length: int) -> Topology:
    """`count` different first draft tokens, each continued by a chain.

    Worked example, `parallel_chains(2, 3)`: (0), (0 0), (0 0 0), (1), (1 0), (1 0 0).
    """
    return Topology.of(
        [
            (first, *[0] * (depth - 1))
            for first in range(count)
            for depth in range(1, length + 1)
        ]
    )


# How often the candidate of rank r is right where nothing was measured: the chances of
# head j + 2 are these to the power of sqrt(j + 1). They only choose a tree's shape.
_TYPICAL_ACCURACIES = (0.5, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01)


def typical_accuracies(block_size: int) -> tuple[tuple[float, ...], ...]:
    """Chances by head and rank, for a tree where nothing was measured."""
    return tuple(
        tuple(chance ** ((head + 1) ** 0.5) for chance in _TYPICAL_ACCURACIES)
        for head in range(block_size - 1)
    )


PATH, BLOCK = ORDERS = ("path", "block")


@register
@dataclasses.dataclass(frozen=True)
class Static(GrowingPart):
    """Settings of the search `static`."""

    name: ClassVar[str] = "static"
    help: ClassVar[str] = "a tree of M nodes whose shape is fixed in advance"
    reference: ClassVar[str] = "Cai et al. 2024 (Medusa)"
    number: ClassVar[str] = "nodes"
    counts: ClassVar[str] = NODES

    nodes: int = setting(32, "nodes M, the certain token included", COUNT)
    order: str = setting(
        PATH,
        "ranks candidates by their refined scores after each path (path), or after the "
        "greedy path alone, so that the block is refined once (block)",
        choice(*ORDERS),
    )

    def build(self, context: BuildContext, paths: Paths, normalise: bool) -> Search:
        """Makes the search; its shape follows the measured accuracies of the heads."""
        del normalise
        accuracies = context.assets.accuracies or typical_accuracies(paths.block_size)
        topology = expected_tree(accuracies, self.nodes)
        tree = StaticTree(topology, context.temperature)
        return RefineFirst(tree) if self.order == BLOCK else tree

    def label(self, order: int | None = None) -> str:
        """What people read in tables."""
        del order
        return f"Medusa tree of {self.nodes}"


@register
@dataclasses.dataclass(frozen=True)
class Chains(GrowingPart):
    """Settings of the search `chains`."""

    name: ClassVar[str] = "chains"
    help: ClassVar[str] = "P greedy paths that begin with different tokens"
    reference: ClassVar[str] = "Leviathan et al. 2023"
    number: ClassVar[str] = "paths"
    counts: ClassVar[str] = DRAFTS

    paths: int = setting(1, "paths P", COUNT)

    @property
    def drafts(self) -> int:
        """P."""
        return self.paths

    def build(self, context: BuildContext, paths: Paths, normalise: bool) -> StaticTree:
        """Makes the search."""
        del normalise
        topology = parallel_chains(self.paths, paths.block_size - 1)
        return StaticTree(topology, context.temperature)

    def label(self, order: int | None = None) -> str:
        """What people read in tables."""
        del order
        return f"{self.paths} chains"
