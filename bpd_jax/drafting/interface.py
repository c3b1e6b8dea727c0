"""What the decode loop and a drafting method say to each other.

A method keeps a *memory* between serial calls: a pytree on the device, or None. Before
each call it proposes in two halves. `look` runs on the device, inside the jitted step,
where the model is at hand. `propose` turns what it saw into a draft tree: on the
device too if `on_device`, else on the host with numpy arrays. After the call, `learn`
sees what came of it. The loop joins these; it knows where a method runs and nothing
else about it.
"""

import dataclasses
from typing import Any, Protocol

import flax.struct
import jax.numpy as jnp

from bpd_jax.drafting.lattice import Drafts, Lattice, build_lattice
from bpd_jax.drafting.tree import DraftTree
from bpd_jax.typing import AnyArray, Array, Float, Int, Params, PyTree


@flax.struct.dataclass
class BoundModel:
    """A model with its parameters, or whatever has the same methods."""

    functions: Any = flax.struct.field(pytree_node=False)
    params: Params

    def lattice(
        self,
        hidden: Float[Array, "B D"],
        next_token: Int[Array, " B"],
        block_size: int,
        width: int,
    ) -> Lattice:
        """The `width` best tokens of heads 2 … `block_size`."""
        candidates = self.functions.block_candidates(
            self.params, hidden, block_size, width
        )
        return build_lattice(next_token, *candidates)

    def states(self, hidden: Float[Array, "B D"]) -> Float[Array, "B D"]:
        """Hidden states as numbers: `View.hidden` only stands for them in a replay."""
        return self.functions.states(self.params, hidden)

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Token embeddings, without positions."""
        return self.functions.embed(self.params, tokens)

    def draft_logits(
        self, states: Float[Array, "... D"], level: int
    ) -> Float[Array, "... draft"]:
        """Logits over the draft vocabulary of any states, as of head `level + 1`."""
        return self.functions.draft_logits(self.params, states, level)

    def draft_tokens(self, indices: Int[Array, "..."]) -> Int[Array, "..."]:
        """Token ids of places in the draft vocabulary."""
        return self.functions.draft_tokens(self.params, indices)


@dataclasses.dataclass(frozen=True)
class View:
    """What a drafter may look at before a serial call.

    Attributes:
      tokens: prompt and text so far; row b holds `lengths[b]` tokens.
      lengths: of the text.
      next_token: the model's own next token, which is certain.
      hidden: final hidden state of the last accepted token, for the model's methods.
      keys: one random key per row, for draws of this call's drafts.
      model: the model.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    next_token: Int[Array, " B"]
    hidden: Float[Array, "B D"]
    keys: Array
    model: BoundModel

    def last_tokens(self, count: int) -> Int[Array, "B C"]:
        """The last `count` tokens of every row's text, -1 before its beginning."""
        places = self.lengths[:, None] - jnp.arange(count, 0, -1)
        found = jnp.take_along_axis(self.tokens, jnp.maximum(places, 0), axis=1)
        return jnp.where(places < 0, -1, found)


@flax.struct.dataclass
class Outcome:
    """What came of a serial call.

    Attributes:
      tree: what was proposed.
      choices: the model's own best token after every node, right or wrong.
      count: tokens that were accepted, 0 in finished rows.
    """

    tree: DraftTree
    choices: Int[Array, "B M"]
    count: Int[Array, " B"]


class Drafter(Protocol):
    """A drafting method. Implementations are frozen dataclasses, hence jit-static."""

    @property
    def on_device(self) -> bool:
        """Whether `propose` can be traced."""
        ...

    @property
    def max_depth(self) -> int:
        """The most tokens on one path of its trees, the certain one included."""
        ...

    @property
    def max_nodes(self) -> int:
        """The most different prefixes that one of its trees holds."""
        ...

    @property
    def max_drafts(self) -> int:
        """The most paths from a root to a leaf that one of its trees holds."""
        ...

    @property
    def arrays(self) -> PyTree:
        """Weights and tables that it reads on the device, or None.

        The loop hands them back to `start`, `look` and `propose`, so that jitted code
        takes them as arguments and not as constants.
        """
        ...

    def start(
        self,
        arrays: PyTree,
        tokens: Int[Array, "B S"],
        lengths: Int[Array, " B"],
        given: PyTree,
    ) -> PyTree:
        """The memory before the first serial call.

        Args:
          arrays: `self.arrays`.
          tokens: the prompts, with room for the whole text.
          lengths: of the prompts.
          given: what the caller knows of these rows; see `generate`.
        """
        ...

    def look(self, view: View, arrays: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        """Device half: what `propose` needs, as arrays, and the memory."""
        ...

    def propose(self, seen: PyTree, arrays: PyTree) -> DraftTree:
        """Second half: the drafts that the next serial call checks.

        On the host `arrays` is None: what it needs there it has itself.
        """
        ...

    def learn(self, memory: PyTree, outcome: Outcome) -> PyTree:
        """The memory after a serial call."""
        ...

    def entropies(self, seen: PyTree) -> Float[Array, "B L"] | None:
        """Entropies of the heads that `look` saw, in nats; None without heads."""
        ...


class Rescorer(Protocol):
    """Refines a lattice into P drafts (paper section 7)."""

    @property
    def on_device(self) -> bool:
        """Whether `refine` can be traced."""
        ...

    @property
    def num_drafts(self) -> int:
        """P."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens of text before the block that `refine` wants to see."""
        ...

    @property
    def arrays(self) -> PyTree:
        """What `refine` reads on the device besides its arguments, or None."""
        ...

    def refine(
        self, lattice: Lattice, context: Int[AnyArray, "B C"], arrays: PyTree
    ) -> Drafts:
        """The P best distinct drafts.

        Args:
          lattice: candidates of the block.
          context: the last C tokens of the text, -1 before its beginning.
          arrays: `self.arrays`, or None on the host.
        """
        ...


class Forgetful:
    """The memory of drafters that have none."""

    arrays: PyTree = None

    def start(
        self,
        arrays: PyTree,
        tokens: Int[Array, "B S"],
        lengths: Int[Array, " B"],
        given: PyTree,
    ) -> PyTree:
        """Remembers nothing."""
        del arrays, tokens, lengths, given

    def learn(self, memory: PyTree, outcome: Outcome) -> PyTree:
        """Learns nothing."""
        del outcome
        return memory

    def entropies(self, seen: PyTree) -> Float[Array, "B L"] | None:
        """Saw no heads."""
        del seen
        return None
