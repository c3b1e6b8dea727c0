"""The interfaces of drafting: drafters, sources, refiners and searches.

The decode loop depends only on `Drafter`. Most drafters are composed of three parts:

- a `Source` provides candidates for the next token of a draft, with log-probabilities:
  block heads, a block drafter, EAGLE-3, a draft model;
- any number of `Refiner`s add scores to them: an n-gram model, a Markov head, a small
  language model;
- a `Search` builds drafts from the sums: the P best paths, a tree of M nodes.

The decode loop calls a drafter in this order:

    memory = drafter.start(arrays, prompts)             once, after the prompts
    seen, memory = drafter.look(view, arrays, memory)   on the device, with the model
    tree = drafter.propose(seen, arrays)                on the device, or on the host
    …                                                   the model verifies the tree
    memory = drafter.learn(arrays, memory, outcome)     on the device

The *memory* is a pytree on the device, or None. On the host `propose` gets numpy
arrays.
A search grows paths level by level in the same way:

    state = start(…)                           the path that is the certain token
    candidates = source.candidates(…, level)   and the sum of the refiners' `scores`
    state = extend(…, level, extension)        for the paths that the search keeps

Implementations are frozen dataclasses, which jitted code takes as static arguments.
Their arrays are excluded from comparisons and are passed to jitted code as arguments:
one compiled program serves all weights of equal shapes.
"""

import abc
import copy
import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int, PyTree
from bpd_jax.drafting.draft_tree import DraftTree
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.models.candidates import Perturbation
from bpd_jax.models.decoded_model import DecodedModel


@dataclasses.dataclass(frozen=True)
class View:
    """The inputs of a drafter before a serial call.

    Attributes:
      tokens: prompt and text so far; row b has `lengths[b]` tokens.
      lengths: lengths of the texts.
      next_token: the certain token: the model's choice of the next token.
      hidden: final hidden state of the last accepted token, for methods of the model.
      keys: one random key per row, for drafts that are sampled.
      noise: adds the random numbers of the model's choice to predictions of the next
        positions, as `sampling.CommonNoise`; None where drafts do not use them.
    """

    # ---- The text ----
    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    next_token: Int[Array, " B"]
    # ---- What the model computed for it ----
    hidden: Float[Array, "B D"]
    keys: Array
    model: DecodedModel
    noise: Perturbation | None = None

    def last_tokens(self, count: int) -> Int[Array, "B C"]:
        """The last `count` tokens of each text, padded with -1 on the left."""
        positions = self.lengths[:, None] - jnp.arange(count, 0, -1)
        tokens = jnp.take_along_axis(self.tokens, jnp.maximum(positions, 0), axis=1)
        return jnp.where(positions < 0, -1, tokens)


@flax.struct.dataclass
class Prompts:
    """The rows of a batch before the first serial call.

    Attributes:
      tokens: the prompts, padded to the length of the longest possible text.
      lengths: lengths of the prompts.
      features: outputs of `Drafter.feature_layers` at every position of the padded
        prompts, concatenated.
      hidden: final hidden states at these positions.
      reference: the reference texts of the oracle; None for other methods.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    features: Float[Array, "B T F"]
    hidden: Float[Array, "B T D"]
    reference: Int[Array, "B S"] | None = None


@flax.struct.dataclass
class Outcome:
    """The outcome of a serial call.

    Attributes:
      tree: the verified drafts.
      choices: the model's choice after every node, accepted or not.
      count: number of accepted tokens, 0 in finished rows.
      features: outputs of `Drafter.feature_layers` along the accepted path; entries
        from `count` on are arbitrary.
      hidden: final hidden states along it, likewise.
    """

    tree: DraftTree
    choices: Int[Array, "B M"]
    count: Int[Array, " B"]
    features: Float[Array, "B L F"]
    hidden: Float[Array, "B L D"]


class Drafter(abc.ABC):
    """A complete drafting method, as the decode loop calls it.

    By default it has no memory and no heads, and drafts on the device one path of
    `max_depth` tokens.
    """

    # ---- Sizes, which are known before anything is compiled ----
    @property
    def on_device(self) -> bool:
        """Whether `propose` runs on the device and can be traced."""
        return True

    @property
    def max_depth(self) -> int:
        """Upper bound of the tokens on a path, including the certain token."""
        return 1

    @property
    def max_nodes(self) -> int:
        """Upper bound of the distinct prefixes in a tree."""
        return self.max_depth

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """Sizes of trees for which a pass is compiled, ascending; the last is M.

        M is `max_nodes`. The smallest pass that holds all valid nodes is run.
        """
        return (self.max_nodes,)

    @property
    def max_drafts(self) -> int:
        """Upper bound of the leaves of a tree."""
        return 1

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the model whose outputs it reads; usually none."""
        return ()

    @property
    def arrays(self) -> PyTree:
        """Weights and tables on the device, or None."""
        return None

    # ---- What the decode loop calls, in this order ----
    def start(self, arrays: PyTree, prompts: Prompts) -> PyTree:
        """The memory before the first serial call."""
        return None

    @abc.abstractmethod
    def look(self, view: View, arrays: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        """Runs on the device; returns the argument of `propose`, and the memory."""

    @abc.abstractmethod
    def propose(self, seen: PyTree, arrays: PyTree) -> DraftTree:
        """Returns the drafts that the next serial call verifies.

        On the host `arrays` is None: a host drafter has its own tables.
        """

    def learn(self, arrays: PyTree, memory: PyTree, outcome: Outcome) -> PyTree:
        """The memory after a serial call."""
        return memory

    def entropies(self, seen: PyTree) -> Float[Array, "B L"] | None:
        """Entropies of the heads, in nats; None without heads."""
        return None


def without_arrays(part: Any) -> Any:
    """A drafter for jitted code: fields that are not compared are None.

    Compiled programs keep their static arguments. With arrays, they would keep those of
    a model that is no longer used.
    """
    if type(part) is tuple:
        return tuple(map(without_arrays, part))
    if isinstance(part, type) or not dataclasses.is_dataclass(part):
        return part
    bare = copy.copy(part)
    for field in dataclasses.fields(part):
        value = without_arrays(getattr(part, field.name)) if field.compare else None
        object.__setattr__(bare, field.name, value)
    return bare


@flax.struct.dataclass
class Candidates:
    """W candidates for the next token of each of n paths, in no particular order.

    Attributes:
      tokens: token ids.
      log_probs: log-probabilities, in nats, which need not be normalised; -inf for
        candidates that must not be used.
    """

    tokens: Int[Array, "B n W"]
    log_probs: Float[Array, "B n W"]


@flax.struct.dataclass
class Extension:
    """The extension of n paths to m paths that are one token longer.

    Attributes:
      parents: index of the path that each new path extends.
      picks: index of its last token among the W candidates.
      tokens: its last token.
    """

    parents: Int[Array, "B m"]
    picks: Int[Array, "B m"]
    tokens: Int[Array, "B m"]


class Source(abc.ABC):
    """Provides candidates for every position of a draft.

    A path begins with the certain token at position 0 of the block. A *lattice source*
    provides the same candidates after every path: its `lattice` is not None. Refiners
    with finitely many states and the exact search need a lattice source.

    Attributes:
      block_size: L, tokens of a path, including the certain token.
      width: W, number of candidates after every path.
      offers_lattice: whether `lattice` is not None.
      is_block_drafter: whether a block drafter provides the candidates; its own Markov
        head then refines them.
      feature_layers: see `Drafter.feature_layers`.
      arrays: arrays on the device, or None; passed to the other methods.
    """

    block_size: int
    width: int
    offers_lattice: bool = False
    is_block_drafter: bool = False
    feature_layers: tuple[int, ...] = ()
    arrays: PyTree = None

    def remember(self, arrays: PyTree, prompts: Prompts) -> PyTree:
        """The memory before the first serial call; by default there is none."""
        return None

    @abc.abstractmethod
    def start(
        self, view: View, arrays: PyTree, memory: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The state of the one path that is the certain token; and the memory."""

    def lattice(self, state: PyTree) -> Lattice | None:
        """The lattice; None, the default, if the candidates depend on the path."""
        return None

    @abc.abstractmethod
    def candidates(self, arrays: PyTree, state: PyTree, level: int) -> Candidates:
        """Candidates for position `level`, 1 … L-1, after each of n paths."""

    @abc.abstractmethod
    def extend(
        self, arrays: PyTree, state: PyTree, level: int, extension: Extension
    ) -> PyTree:
        """The state of the new paths, whose last token is at position `level`."""

    def learn(self, arrays: PyTree, memory: PyTree, outcome: Outcome) -> PyTree:
        """The memory after a serial call; by default it is unchanged."""
        return memory


class Refiner(abc.ABC):
    """Adds weighted scores to a source's candidates, with a state per path.

    Refiners whose state is one of finitely many nodes are `FiniteRefiner`s of
    `refiners.transitions`, which are summed before the search.

    Attributes:
      arrays: arrays on the device; passed to the other methods.
    """

    arrays: PyTree

    def remember(self, arrays: PyTree, prompts: Prompts) -> PyTree:
        """The memory before the first serial call; by default there is none."""
        return None

    @abc.abstractmethod
    def start(
        self, view: View, lattice: Lattice | None, arrays: PyTree, memory: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The state of the one path that is the certain token; and the memory."""

    @abc.abstractmethod
    def scores(
        self, arrays: PyTree, state: PyTree, level: int, tokens: Int[Array, "B n W"]
    ) -> Float[Array, "B n W"]:
        """Weighted scores of candidates at position `level` after each of n paths."""

    @abc.abstractmethod
    def extend(
        self, arrays: PyTree, state: PyTree, level: int, extension: Extension
    ) -> PyTree:
        """The state of the new paths, whose last token is at position `level`."""


class Search(abc.ABC):
    """Builds drafts from a source and its refiners (`path_drafter.Paths`)."""

    @abc.abstractmethod
    def max_nodes(self, block_size: int, width: int) -> int:
        """Upper bound of the distinct prefixes in a tree."""

    def pass_sizes(self, block_size: int, width: int) -> tuple[int, ...]:
        """See `Drafter`; by default a single size."""
        return (self.max_nodes(block_size, width),)

    @abc.abstractmethod
    def max_drafts(self, block_size: int, width: int) -> int:
        """Upper bound of the leaves of a tree."""

    @property
    def draws(self) -> bool:
        """Whether drafts are sampled, for speculative sampling; False by default."""
        return False

    @abc.abstractmethod
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
          paths: a `path_drafter.Paths`.
          arrays: its arrays.
          state: its initial state.
          first: the certain token.
          key: one random key per row, for drafts that are sampled.
        """
