"""Drafting only while it pays.

On a CPU a serial call with drafts takes noticeably longer than one without. A gated
drafter stops drafting while calls yield fewer tokens than plain decoding would in the
same time, and now and then tries again. That depends on the accepted tokens and on the
price of a call alone (`decoding.call_price`), not on a clock. `benchmarks.gate` shows
what a choice of the numbers below loses.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int, PyTree
from bpd_jax.drafting.draft_tree import DraftTree
from bpd_jax.drafting.interface import Outcome, Prompts, View
from bpd_jax.drafting.union import WrappedDrafter

# Tokens above the price that a call is expected to yield before there was one, and the
# share of each call in the average.
_CREDIT, _RATE = 1.0, 1 / 10
# Calls without drafts until one with drafts is tried; twice as many after each trial
# that did not pay, up to the second number.
_PATIENCE, _LONGEST = 16, 128

Seen: TypeAlias = tuple[Bool[Array, ""], Int[Array, " B"], PyTree]
"""Whether it drafts, the certain token, and what the drafter has seen."""


@flax.struct.dataclass
class GateMemory:
    """The memory of a gated drafter.

    Attributes:
      expected: tokens that a call with drafts is expected to yield, an average.
      waits: number of calls since the last one with drafts.
      patience: number of such calls after which drafts are tried again.
      opens: whether the next call has drafts, the same in all rows.
      pending: `Outcome.features` of the last tokens, of which `inner` has not learned,
        because that takes as long for one token as for several; `fill` is their number.
    """

    inner: PyTree
    expected: Float[Array, " B"]
    waits: Int[Array, " B"]
    patience: Int[Array, " B"]
    opens: Bool[Array, " B"]
    pending: Float[Array, "B L F"]
    fill: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class GatedDrafter(WrappedDrafter):
    """Drafts while the calls of the rows, which share their time, yield enough tokens.

    Attributes:
      inner: a drafter on the device, whose trees have a single root, whose memory
        `look` does not change (none with `Part.reads_on`), and which learns from
        features alone.
      price: time of a call with drafts, in calls without; an argument of programs.
    """

    price: float = dataclasses.field(compare=False)

    @property
    def arrays(self) -> PyTree:
        return self.inner.arrays, jnp.float32(self.price)

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({1, *self.inner.pass_sizes}))

    def start(self, arrays: PyTree, prompts: Prompts) -> GateMemory:
        """Begins with drafts."""
        (inner, price), rows = arrays, prompts.lengths.shape
        pending, none = prompts.features[:, :1], jnp.zeros(rows, jnp.int32)
        return GateMemory(
            inner=self.inner.start(inner, prompts),
            expected=jnp.broadcast_to(price + _CREDIT, rows),
            waits=none,
            patience=jnp.full(rows, _PATIENCE, jnp.int32),
            opens=jnp.ones(rows, bool),
            pending=jnp.zeros_like(jnp.repeat(pending, self.max_depth, axis=1)),
            fill=none,
        )

    def look(
        self, view: View, arrays: PyTree, memory: GateMemory
    ) -> tuple[Seen, GateMemory]:
        """Looks, unless drafts do not pay."""
        opens = memory.opens.all()
        seen = _if(opens, lambda: self.inner.look(view, arrays[0], memory.inner)[0])
        return (opens, view.next_token, seen), memory

    def propose(self, seen: Seen, arrays: PyTree) -> DraftTree:
        """The drafts, or the certain token alone."""
        opens, first, inner = seen
        tree = _if(opens, lambda: self.inner.propose(inner, arrays[0]))
        alone = (jnp.arange(tree.tokens.shape[1]) == 0) & ~opens
        return dataclasses.replace(
            tree,
            tokens=jnp.where(alone, first[:, None], tree.tokens),
            parents=jnp.where(opens, tree.parents, -1),
            valid=tree.valid | alone,
        )

    def learn(self, arrays: PyTree, memory: GateMemory, outcome: Outcome) -> GateMemory:
        """Averages the tokens of calls with drafts, and decides about the next call."""
        (arrays, price), count = arrays, outcome.count
        opened, running = memory.opens.all(), count > 0
        gain = _RATE * (count - memory.expected)
        expected = memory.expected + jnp.where(opened & running, gain, 0.0)
        mean = expected.mean(where=running)  # NaN, which opens nothing, without rows.
        trial = opened & (memory.waits >= memory.patience)
        longer = jnp.minimum(2 * memory.patience, _LONGEST)
        tried = jnp.where(count >= price, _PATIENCE, longer)
        patience = jnp.where(trial, tried, memory.patience)
        waits = jnp.where(opened, 0, memory.waits + 1)
        opens = (mean >= price) | (waits >= patience).any()
        # Without drafts, tokens wait until they are many, or the next call has drafts.
        place = jnp.arange(self.max_depth) == memory.fill[:, None]
        first = outcome.features[:, :1].astype(memory.pending.dtype)
        pending = jnp.where(place[:, :, None], first, memory.pending)
        fill = memory.fill + count
        due = opened | opens | (fill >= self.max_depth).any()
        counts = jnp.where(opened, count, fill)
        features = jnp.where(opened, outcome.features, pending)
        late = dataclasses.replace(outcome, count=counts, features=features)
        # The only condition that returns this memory, because XLA copies it.
        learn = functools.partial(self.inner.learn, arrays, outcome=late)
        inner = jax.lax.cond(due, learn, lambda inner: inner, memory.inner)
        fill, opens = jnp.where(due, 0, fill), jnp.broadcast_to(opens, running.shape)
        return GateMemory(inner, expected, waits, patience, opens, pending, fill)

    def entropies(self, seen: Seen) -> Float[Array, "B L"] | None:
        """Those of the drafter; NaN without drafts."""
        opens, _, inner = seen
        entropies = self.inner.entropies(inner)
        return None if entropies is None else jnp.where(opens, entropies, jnp.nan)


def _if(condition: Bool[Array, ""], function: Callable[[], PyTree]) -> PyTree:
    """The result of a function, or zeros."""
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(function))
    return jax.lax.cond(condition, function, lambda: zeros)
