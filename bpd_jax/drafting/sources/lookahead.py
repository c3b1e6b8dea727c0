"""Lookahead decoding: n-grams from parallel Jacobi iterations (Fu et al. 2024).

It needs no heads. A *window* contains guesses of future tokens: W columns, one for each
future position, and N-1 levels, one for each of the last serial calls. Every serial
call runs the window through the model as a tree, along with the drafts to verify. The
model's tokens after the last level are the next level; with the tokens of its column,
each of them forms an n-gram that the model is likely to generate. The n-grams are added
to a *pool*; those that begin with the certain token are the drafts.

The tree (N = 4, W = 3; node `lc` is level l of column c; `00` is the certain token):

    00 - 01 - 02          depths 0 1 2
     |    |    |
    10   11   12                 1 2 3
     |    |    |
    20   21   22                 2 3 4

The model's tokens after `20`, `21` and `22` are the new level.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import integer, setting
from bpd_jax.base.typing import Array, Bool, Int
from bpd_jax.drafting.draft_tree import DraftTree, take
from bpd_jax.drafting.interface import Drafter, Outcome, Prompts, View
from bpd_jax.drafting.parts import (
    COUNT,
    MOST_DRAFTS,
    BuildContext,
    StandalonePart,
    register,
)


@flax.struct.dataclass
class Guesses:
    """The state of lookahead between serial calls.

    Attributes:
      window: levels, the oldest first; level l of column c is a guess of the token
        c + l positions after the certain one.
      pool: different n-grams, the most recent first, padded with -1.
    """

    window: Int[Array, "B N-1 W"]
    pool: Int[Array, "B C N"]


@flax.struct.dataclass
class CallInputs:
    """The certain token, its continuations in the pool if `valid`, and the window."""

    next_token: Int[Array, " B"]
    drafts: Int[Array, "B G N-1"]
    valid: Bool[Array, "B G"]
    window: Int[Array, "B N-1 W"]


@dataclasses.dataclass(frozen=True)
class LookaheadDrafter(Drafter):
    """Verifies n-grams of the pool, and generates new ones with the window.

    When several tokens are accepted, the columns are shifted accordingly, and the
    columns of accepted positions move to the end, where any tokens will do.

    Attributes:
      window: W, columns.
      order: N, the length of the n-grams.
      guesses: G, the highest number of n-grams verified in one call, at most C.
      pool_size: C, the highest number of n-grams in the pool of each row.
    """

    window: int
    order: int
    guesses: int
    pool_size: int = 1024

    @property
    def max_depth(self) -> int:
        """The depth of the window's last node, or of the n-grams."""
        return max(self.window + self.order - 2, self.order)

    @property
    def max_nodes(self) -> int:
        """N-1 nodes for each guess and each column; the root belongs to a column."""
        return (self.order - 1) * (self.guesses + self.window)

    @property
    def max_drafts(self) -> int:
        """One draft for each guess and each column."""
        return self.guesses + self.window

    def start(self, arrays: None, prompts: Prompts) -> Guesses:
        """Fills the pool, and randomly the window, with n-grams of the prompt."""
        tokens, lengths = prompts.tokens, prompts.lengths
        step = jnp.arange(self.order)
        most = min(self.pool_size, tokens.shape[1])
        begin = lengths[:, None] - self.order - jnp.arange(most)
        places = jnp.maximum(begin[:, :, None] + step, 0)
        ngrams = jnp.where(begin[:, :, None] < 0, -1, take(tokens, places))
        # Equal random numbers for all rows: a text must not depend on its batch.
        uniform = jax.random.uniform(jax.random.key(0), (1, self.window))
        starts = (uniform * lengths[:, None]).astype(jnp.int32)
        pieces = (starts[:, None] + step[:-1, None]) % lengths[:, None, None]
        empty = jnp.full((len(lengths), self.pool_size, self.order), -1, tokens.dtype)
        return Guesses(take(tokens, pieces), _updated(empty, ngrams))

    def look(
        self, view: View, arrays: None, memory: Guesses
    ) -> tuple[CallInputs, Guesses]:
        """Finds the latest n-grams that begin with the certain token."""
        matches = memory.pool[:, :, 0] == view.next_token[:, None]
        recency = jnp.where(matches, jnp.arange(self.pool_size, 0, -1), 0)
        best, index = jax.lax.top_k(recency, self.guesses)
        drafts = take(memory.pool, index)[:, :, 1:]
        return CallInputs(view.next_token, drafts, best > 0, memory.window), memory

    def propose(self, seen: CallInputs, arrays: None) -> DraftTree:
        """Returns one tree of the n-grams and the window."""
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
        # Drafts from an empty pool are -1, which is not a token.
        tokens = [window[:, :1], jnp.maximum(drafts, 0), window[:, 1:]]
        used = jnp.repeat(seen.valid, steps, axis=1)
        return DraftTree(
            tokens=jnp.concatenate(tokens, axis=1),
            parents=per_row(parents),
            depths=per_row(depths),
            ranks=per_row(ranks),
            valid=jnp.ones((batch, size), bool).at[:, chains.reshape(-1)].set(used),
        )

    def learn(self, arrays: None, memory: Guesses, outcome: Outcome) -> Guesses:
        """Adds the new level to the window, and its n-grams to the pool."""
        nodes = self._window_nodes()
        old, new = outcome.tree.tokens[:, nodes], outcome.choices[:, nodes[-1:]]
        levels = jnp.concatenate([old, new], axis=1)
        shift = outcome.count[:, None] - 1
        columns = (jnp.arange(self.window) + shift) % self.window
        updated = Guesses(
            window=jnp.take_along_axis(levels[:, 1:], columns[:, None], axis=2),
            pool=_updated(memory.pool, levels.swapaxes(1, 2)),
        )
        running = (outcome.count > 0)[:, None, None]
        return jax.tree.map(lambda a, b: jnp.where(running, a, b), updated, memory)

    def _window_nodes(self) -> np.ndarray:
        """`[N-1, W]`: the window's nodes: the root and the last nodes of the tree."""
        size = (self.order - 1) * self.window
        nodes = self.max_nodes - size + np.arange(size)
        nodes[0] = 0
        return nodes.reshape(self.order - 1, self.window)


def _updated(
    pool: Int[Array, "B C N"], latest: Int[Array, "B n N"]
) -> Int[Array, "B C N"]:
    """The pool with the latest n-grams in front, without duplicates."""
    entries = jnp.concatenate([latest, pool], axis=1)
    # The entries of the pool are different from each other.
    same = (entries[:, :, None] == latest[:, None]).all(-1)
    before = jnp.arange(latest.shape[1]) < jnp.arange(entries.shape[1])[:, None]
    keep = ~(same & before).any(-1) & (entries[:, :, 0] >= 0)
    order = jnp.argsort(~keep, axis=1, stable=True)[:, : pool.shape[1]]
    return jnp.where(take(keep, order)[:, :, None], take(entries, order), -1)


@register
@dataclasses.dataclass(frozen=True)
class Lookahead(StandalonePart):
    """Settings of the source `lookahead`."""

    name = "lookahead"
    title = "Lookahead of {window}"
    help = "n-grams from parallel Jacobi iterations"
    reference = "Fu et al. 2024"
    number_setting = "window"
    needs_model = True

    window: int = setting(8, "columns of the window", COUNT)
    order: int = setting(4, "length of its n-grams", integer(2, 32))
    guesses: int | None = setting(
        None, "n-grams verified per serial call; default window", COUNT.or_none()
    )

    def build(self, context: BuildContext) -> LookaheadDrafter:
        drafter = LookaheadDrafter(self.window, self.order, self.guesses or self.window)
        if drafter.max_nodes > MOST_DRAFTS:
            raise UserError(
                f"{context.method} verifies {drafter.max_nodes} tokens in every serial "
                f"call, more than {MOST_DRAFTS}: give a smaller window, order or "
                "number of guesses."
            )
        return drafter
