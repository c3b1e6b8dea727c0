"""The four protocols of drafting: drafters, sources, refiners and searches.

The decode loop knows a `Drafter` only. Most drafters are put together from three parts:

- a `Source` says which tokens may follow a draft, and how likely each is: the block
  heads, a block drafter, Hydra heads, a draft model;
- any number of `Refiner`s add scores of their own: an n-gram model, a Markov head, a
  small language model, a recurrent network;
- a `Search` grows drafts from the sum: the P best paths, a tree of M nodes.

A drafter keeps a *memory* between serial calls: a pytree on the device, or None. Before
each call it proposes in two halves. `look` runs on the device, inside the jitted step,
where the model is available. `propose` turns the result into a draft tree: on the
device if `on_device` is set, otherwise on the host with numpy arrays. After the call,
`learn` sees its outcome.

Implementations are frozen dataclasses, so that jitted code can take them as static
arguments. Their arrays do not take part in comparisons and reach jitted code as
arguments: one compiled program serves all weights of equal shapes.
"""

import dataclasses
from typing import Any, Protocol

import flax.struct
import jax.numpy as jnp

from bpd_jax.drafting.lattice import Lattice, build_lattice
from bpd_jax.drafting.tree import DraftTree
from bpd_jax.typing import Array, Float, Int, Params, PyTree


@flax.struct.dataclass
class BoundModel:
    """A model with its parameters, or an object with the same methods."""

    functions: Any = flax.struct.field(pytree_node=False)
    params: Params

    def lattice(
        self,
        hidden: Float[Array, "B D"],
        next_token: Int[Array, " B"],
        block_size: int,
        width: int,
        features: Float[Array, "B F"] | None = None,
    ) -> Lattice:
        """The `width` best tokens of heads 2 … `block_size`.

        Args:
          hidden: final hidden states of the last accepted tokens.
          next_token: the certain tokens.
          block_size: heads to use, head 1 included.
          width: W.
          features: outputs of `head_features` at the last accepted tokens.
        """
        candidates = self.functions.block_candidates(
            self.params, hidden, block_size, width, next_token, features
        )
        return build_lattice(next_token, *candidates)

    def states(self, hidden: Float[Array, "B D"]) -> Float[Array, "B D"]:
        """The hidden states as numbers: in a replay, `View.hidden` refers to them."""
        return self.functions.states(self.params, hidden)

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Token embeddings, without positions."""
        return self.functions.embed(self.params, tokens)

    def draft_logits(
        self, states: Float[Array, "... D"], level: int
    ) -> Float[Array, "... draft"]:
        """Logits of head `level + 1` over the draft vocabulary, for any states."""
        return self.functions.draft_logits(self.params, states, level)

    def draft_tokens(self, indices: Int[Array, "..."]) -> Int[Array, "..."]:
        """Token ids of indices into the draft vocabulary."""
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
        positions = self.lengths[:, None] - jnp.arange(count, 0, -1)
        tokens = jnp.take_along_axis(self.tokens, jnp.maximum(positions, 0), axis=1)
        return jnp.where(positions < 0, -1, tokens)


@flax.struct.dataclass
class Prompts:
    """The rows of a batch before the first serial call.

    Attributes:
      tokens: the prompts, with room for the whole text.
      lengths: of the prompts.
      features: states of `Drafter.feature_layers` at every position of the padded
        prompts, concatenated; None if the drafter asks for none.
      given: what the caller knows of these rows, such as the oracle's reference; see
        `generate`.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    features: Float[Array, "B T F"] | None = None
    given: Any = None


@flax.struct.dataclass
class Outcome:
    """The outcome of a serial call.

    Attributes:
      tree: what was proposed.
      choices: the model's own best token after every node, accepted or not.
      count: tokens that were accepted, 0 in finished rows.
      features: states of `Drafter.feature_layers` along the accepted path; entries from
        `count` on are meaningless. None if the drafter asks for none.
    """

    tree: DraftTree
    choices: Int[Array, "B M"]
    count: Int[Array, " B"]
    features: Float[Array, "B L F"] | None = None


class Drafter(Protocol):
    """What the decode loop calls: a complete drafting method."""

    @property
    def on_device(self) -> bool:
        """Whether `propose` can be traced."""
        ...

    @property
    def max_depth(self) -> int:
        """Upper bound of the tokens on one path, the certain one included."""
        ...

    @property
    def max_nodes(self) -> int:
        """Upper bound of the different prefixes in one tree."""
        ...

    @property
    def max_drafts(self) -> int:
        """Upper bound of the paths from a root to a leaf in one tree."""
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the model whose states it reads; usually none."""
        ...

    @property
    def arrays(self) -> PyTree:
        """Weights and tables that it reads on the device, or None."""
        ...

    def start(self, arrays: PyTree, prompts: Prompts) -> PyTree:
        """The memory before the first serial call."""
        ...

    def look(self, view: View, arrays: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        """Device half: what `propose` needs, as arrays; and the memory."""
        ...

    def propose(self, seen: PyTree, arrays: PyTree) -> DraftTree:
        """Second half: the drafts that the next serial call verifies.

        On the host `arrays` is None: a host drafter holds what it needs there.
        """
        ...

    def learn(self, arrays: PyTree, memory: PyTree, outcome: Outcome) -> PyTree:
        """The memory after a serial call."""
        ...

    def entropies(self, seen: PyTree) -> Float[Array, "B L"] | None:
        """Entropies of the heads that `look` evaluated, in nats; None without heads."""
        ...


@flax.struct.dataclass
class Candidates:
    """W candidates for the next token of each of n paths, in no particular order.

    Attributes:
      tokens: ids.
      log_probs: natural logarithms; they need not sum to 1, and candidates that must
        not be used have -inf.
    """

    tokens: Int[Array, "B n W"]
    log_probs: Float[Array, "B n W"]


@flax.struct.dataclass
class Extension:
    """How n paths become m paths that are one token longer.

    Attributes:
      parents: index of the path that each new one continues.
      picks: index of the candidate among its W.
      tokens: that candidate.
    """

    parents: Int[Array, "B m"]
    picks: Int[Array, "B m"]
    tokens: Int[Array, "B m"]


class Source(Protocol):
    """Offers candidates for every position of a draft.

    A path begins with the certain token at position 0 of the block. A *lattice source*
    offers the same candidates after every path: its `lattice` is not None, and
    refiners with finitely many states and the exact search work on it.
    """

    @property
    def block_size(self) -> int:
        """L: tokens of a path, the certain one included."""
        ...

    @property
    def width(self) -> int:
        """W: candidates after every path."""
        ...

    @property
    def offers_lattice(self) -> bool:
        """Whether `lattice` is not None."""
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See `Drafter.feature_layers`."""
        ...

    @property
    def arrays(self) -> PyTree:
        """What it reads on the device, or None; passed to every other method."""
        ...

    def remember(self, arrays: PyTree, prompts: Prompts) -> PyTree:
        """The memory before the first serial call."""
        ...

    def start(
        self, view: View, arrays: PyTree, memory: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The state of the one path that is the certain token; and the memory."""
        ...

    def lattice(self, state: PyTree) -> Lattice | None:
        """The lattice, if the candidates do not depend on the path."""
        ...

    def candidates(self, arrays: PyTree, state: PyTree, level: int) -> Candidates:
        """Candidates for position `level`, 1 … L-1, after each of n paths."""
        ...

    def extend(
        self, arrays: PyTree, state: PyTree, level: int, extension: Extension
    ) -> PyTree:
        """The state of the new paths, whose last token is at position `level`."""
        ...

    def learn(self, arrays: PyTree, memory: PyTree, outcome: Outcome) -> PyTree:
        """The memory after a serial call."""
        ...


class Refiner(Protocol):
    """Adds weighted scores to a source's candidates, with a state per path.

    Refiners whose state is one of finitely many nodes derive from
    `refiners.transitions.FiniteRefiner` and are summed before the search.
    """

    @property
    def arrays(self) -> PyTree:
        """What it reads on the device; passed to every other method."""
        ...

    def remember(self, arrays: PyTree, prompts: Prompts) -> PyTree:
        """The memory before the first serial call."""
        ...

    def start(
        self, view: View, lattice: Lattice | None, arrays: PyTree, memory: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The state of the one path that is the certain token; and the memory."""
        ...

    def scores(
        self, arrays: PyTree, state: PyTree, level: int, tokens: Int[Array, "B n W"]
    ) -> Float[Array, "B n W"]:
        """What it adds to candidates at position `level` after each of n paths."""
        ...

    def extend(
        self, arrays: PyTree, state: PyTree, level: int, extension: Extension
    ) -> PyTree:
        """The state of the new paths, whose last token is at position `level`."""
        ...


class Search(Protocol):
    """Grows drafts from a source and its refiners (`paths.Paths`)."""

    def max_nodes(self, block_size: int, width: int) -> int:
        """Upper bound of the different prefixes in one tree."""
        ...

    def max_drafts(self, block_size: int, width: int) -> int:
        """Upper bound of the leaves in one tree."""
        ...

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn at random, for speculative sampling."""
        ...

    def grow(
        self,
        paths: Any,
        arrays: PyTree,
        state: PyTree,
        first: Int[Array, " B"],
        key: Array | None = None,
    ) -> DraftTree:
        """Returns the drafts.

        Args:
          paths: a `paths.Paths`.
          arrays: its arrays.
          state: its first state.
          first: the certain token.
          key: one random key per row, for a search that draws.
        """
        ...


class Stateless:
    """The memory of drafters and sources that keep none."""

    arrays: PyTree = None
    feature_layers: tuple[int, ...] = ()

    def start(self, arrays: PyTree, prompts: Prompts) -> PyTree:
        """Keeps nothing."""
        del arrays, prompts

    def learn(self, arrays: PyTree, memory: PyTree, outcome: Outcome) -> PyTree:
        """Keeps nothing."""
        del arrays, outcome
        return memory

    def entropies(self, seen: PyTree) -> Float[Array, "B L"] | None:
        """There are no heads."""
        del seen
        return None
