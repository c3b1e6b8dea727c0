"""Lookahead decoding: n-grams from parallel Jacobi iterations (Fu et al. 2024).

Needs no heads. A *window* holds guesses of the tokens to come: W columns, one for each
coming position, and N-1 levels, one for each of the last serial calls. Every call runs
the window through the model, as a tree, beside the drafts that it checks. What the
model says after the last level is the next level, and together with its column an
n-gram of what the model tends to say. N-grams go to a *pool*; those that begin with the
certain token are the drafts.

The tree (N = 4, W = 3; node `lc` is level l of column c; `00` is the certain token):

    00 - 01 - 02          depths 0 1 2
     |    |    |
    10   11   12                 1 2 3
     |    |    |
    20   21   22                 2 3 4

The model's tokens after `20`, `21` and `22` are the new level.
"""

import dataclasses
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.drafting.interface import Outcome, Prompts, Stateless, View
from bpd_jax.drafting.parts import (
    COUNT,
    MOST_DRAFTS,
    BuildContext,
    StandalonePart,
    register,
)
from bpd_jax.drafting.tree import DraftTree, take
from bpd_jax.errors import UserError
from bpd_jax.settings import integer, setting
from bpd_jax.typing import Array, Bool, Int


@flax.struct.dataclass
class Guesses:
    """What lookahead keeps between serial calls.

    Attributes:
      window: levels, the oldest first; level l of column c guesses the token c + l
        places after the certain one.
      pool: different n-grams, the most recent first; -1 where there are no more.
    """

    window: Int[Array, "B N-1 W"]
    pool: Int[Array, "B C N"]


@flax.struct.dataclass
class Turn:
    """What one serial call checks and asks.

    Attributes:
      next_token: the certain token.
      drafts: continuations of it, from the pool.
      found: which of them there are.
      window: see `Guesses`.
    """

    next_token: Int[Array, " B"]
    drafts: Int[Array, "B G N-1"]
    found: Bool[Array, "B G"]
    window: Int[Array, "B N-1 W"]


@dataclasses.dataclass(frozen=True)
class LookaheadDrafter(Stateless):
    """Checks n-grams of the pool, and lets the window make new ones.

    Where several tokens are accepted, columns move along with the text, and those that
    it has passed take up the rear: any tokens will do there.

    Attributes:
      window: W, columns.
      order: N, the length of the n-grams.
      guesses: G, the most n-grams that are checked in one call.
      pool_size: C, the most n-grams that are kept for each row.
    """

    window: int
    order: int
    guesses: int
    pool_size: int = 1024
    on_device: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        if self.window < 1 or self.order < 2 or self.guesses < 1:
            raise UserError(
                f"lookahead with window {self.window}, order {self.order} and "
                f"{self.guesses} guesses: give a window of at least 1, an order of at "
                "least 2 and at least 1 guess."
            )
        if self.guesses > self.pool_size:
            raise UserError(
                f"lookahead cannot check {self.guesses} n-grams of a pool of "
                f"{self.pool_size}: give fewer guesses."
            )

    @property
    def max_depth(self) -> int:
        """Of the window's last node, or of the n-grams."""
        return max(self.window + self.order - 2, self.order)

    @property
    def max_nodes(self) -> int:
        """N-1 for each guess and each column; the root is one of the columns'."""
        return (self.order - 1) * (self.guesses + self.window)

    @property
    def max_drafts(self) -> int:
        """One for each guess and each column."""
        return self.guesses + self.window

    def start(self, arrays: None, prompts: Prompts) -> Guesses:
        """N-grams of the prompt; columns begin as pieces of it, taken at random."""
        del arrays
        tokens, lengths = prompts.tokens, prompts.lengths
        step = jnp.arange(self.order)
        most = min(self.pool_size, tokens.shape[1])
        begin = lengths[:, None] - self.order - jnp.arange(most)
        places = jnp.maximum(begin[:, :, None] + step, 0)
        ngrams = jnp.where(begin[:, :, None] < 0, -1, take(tokens, places))
        # The same chance for every row: a text must not depend on its batch.
        chance = jax.random.uniform(jax.random.key(0), (1, self.window))
        anywhere = (chance * lengths[:, None]).astype(jnp.int32)
        pieces = (anywhere[:, None] + step[:-1, None]) % lengths[:, None, None]
        empty = jnp.full((len(lengths), self.pool_size, self.order), -1, tokens.dtype)
        return Guesses(take(tokens, pieces), _renewed(empty, ngrams))

    def look(self, view: View, arrays: None, memory: Guesses) -> tuple[Turn, Guesses]:
        """Finds the latest n-grams that begin with the certain token."""
        del arrays
        fits = memory.pool[:, :, 0] == view.next_token[:, None]
        recency = jnp.where(fits, jnp.arange(self.pool_size, 0, -1), 0)
        found, index = jax.lax.top_k(recency, self.guesses)
        drafts = take(memory.pool, index)[:, :, 1:]
        return Turn(view.next_token, drafts, found > 0, memory.window), memory

    def propose(self, seen: Turn, arrays: None) -> DraftTree:
        """Returns one tree of the n-grams and the window."""
        del arrays
        batch, size = seen.next_token.shape[0], self.max_nodes
        steps = self.order - 1
        parents, depths, ranks = (np.zeros(size, np.int32) for _ in range(3))
        chains = 1 + np.arange(self.guesses * steps).reshape(self.guesses, steps)
        parents[chains] = np.where(np.arange(steps) == 0, 0, chains - 1)
        depths[chains] = 1 + np.arange(steps)
        ranks[chains] = np.arange(self.guesses)[:, None]
        nodes, column = self._window_nodes(), np.arange(self.window)
        parents[nodes[0]] = np.append(-1, nodes[0, :-1])
        parents[nodes[1:]] = nodes[:-1]
        depths[nodes] = np.arange(steps)[:, None] + column
        ranks[nodes] = self.guesses + column
        ranks[0] = 0

        def per_row(values: np.ndarray) -> Array:
            return jnp.broadcast_to(jnp.asarray(values), (batch, size))

        window = seen.window.at[:, 0, 0].set(seen.next_token).reshape(batch, -1)
        drafts = seen.drafts.reshape(batch, -1)
        # An empty pool has drafts of -1, which are no tokens.
        tokens = [window[:, :1], jnp.maximum(drafts, 0), window[:, 1:]]
        used = jnp.repeat(seen.found, steps, axis=1)
        return DraftTree(
            tokens=jnp.concatenate(tokens, axis=1),
            parents=per_row(parents),
            depths=per_row(depths),
            ranks=per_row(ranks),
            valid=jnp.ones((batch, size), bool).at[:, chains.reshape(-1)].set(used),
        )

    def learn(self, arrays: None, memory: Guesses, outcome: Outcome) -> Guesses:
        """Puts the new level into the window, and its n-grams into the pool."""
        del arrays
        nodes = self._window_nodes()
        old, new = outcome.tree.tokens[:, nodes], outcome.choices[:, nodes[-1:]]
        levels = jnp.concatenate([old, new], axis=1)
        passed = outcome.count[:, None] - 1
        columns = (jnp.arange(self.window) + passed) % self.window
        learnt = Guesses(
            window=jnp.take_along_axis(levels[:, 1:], columns[:, None], axis=2),
            pool=_renewed(memory.pool, levels.swapaxes(1, 2)),
        )
        running = (outcome.count > 0)[:, None, None]
        return jax.tree.map(lambda a, b: jnp.where(running, a, b), learnt, memory)

    def _window_nodes(self) -> np.ndarray:
        """`[N-1, W]`: the window's nodes in the tree; all but the root come last."""
        size = (self.order - 1) * self.window
        nodes = self.max_nodes - size + np.arange(size)
        nodes[0] = 0
        return nodes.reshape(self.order - 1, self.window)


def _renewed(
    pool: Int[Array, "B C N"], latest: Int[Array, "B n N"]
) -> Int[Array, "B C N"]:
    """The pool with the latest n-grams in front; of equal ones the first stays."""
    entries = jnp.concatenate([latest, pool], axis=1)
    # The pool's own entries differ.
    same = (entries[:, :, None] == latest[:, None]).all(-1)
    before = jnp.arange(latest.shape[1]) < jnp.arange(entries.shape[1])[:, None]
    keep = ~(same & before).any(-1) & (entries[:, :, 0] >= 0)
    order = jnp.argsort(~keep, axis=1, stable=True)[:, : pool.shape[1]]
    return jnp.where(take(keep, order)[:, :, None], take(entries, order), -1)


@register
@dataclasses.dataclass(frozen=True)
class Lookahead(StandalonePart):
    """Settings of the source `lookahead`."""

    name: ClassVar[str] = "lookahead"
    help: ClassVar[str] = "n-grams from parallel Jacobi iterations"
    reference: ClassVar[str] = "Fu et al. 2024"
    number: ClassVar[str] = "window"
    needs_model: ClassVar[bool] = True

    window: int = setting(8, "columns of the window", COUNT)
    order: int = setting(4, "length of its n-grams", integer(2, 32))
    guesses: int | None = setting(
        None, "n-grams verified per serial call; default window", COUNT.or_none()
    )

    def build(self, context: BuildContext) -> LookaheadDrafter:
        """Makes the drafter.

        Raises:
          UserError: its trees would be too large.
        """
        drafter = LookaheadDrafter(self.window, self.order, self.guesses or self.window)
        if drafter.max_nodes > MOST_DRAFTS:
            raise UserError(
                f"{context.method} verifies {drafter.max_nodes} tokens in every serial "
                f"call, more than {MOST_DRAFTS}: give a smaller window, order or "
                "number of guesses."
            )
        return drafter

    def label(self, order: int | None = None) -> str:
        """What people read in tables."""
        del order
        return f"Lookahead of {self.window}"
