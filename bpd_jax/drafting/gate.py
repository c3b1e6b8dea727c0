"""Drafting only while it pays.

On a CPU a serial call that verifies drafts takes noticeably longer than one that
decodes a single token, so that drafts which are rarely accepted make decoding slower.
A gated drafter follows how many tokens its calls yield, and stops drafting while they
yield less than plain decoding would in the same time. Now and then it tries again. How
long both kinds of calls take it reads from a clock, where the program can read one.
What it has learned of times and tokens it keeps for the next batch of texts.

`benchmarks.gate` shows what a choice of the numbers below loses: it knows for every
position of some texts how many tokens a call there would yield.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import Array, Bool, Float, Int, PyTree, UInt
from bpd_jax.drafting.draft_tree import DraftTree
from bpd_jax.drafting.interface import Outcome, Prompts, View
from bpd_jax.drafting.union import WrappedDrafter
from bpd_jax.models import device_ops

# The average of a row begins with what calls of earlier texts yielded, as if that were
# the average of so many calls; each call counts a little more than the one before.
_EARLIER, _DECAY = 8.0, 0.95

# The share of a call in that average of earlier texts, and the tokens above the price
# that are expected before there are any.
_USUAL_RATE, _CREDIT = 1 / 64, 1.0

# Calls without drafts until one with drafts is tried; twice as many after each trial
# that did not pay, up to the second number.
_PATIENCE, _LONGEST = 16, 128

# Two calls without drafts are made, only to know their time, after so many with drafts,
# first and then again, unless these yield more tokens than a multiple of the price.
_FIRST, _FURTHER, _DOUBT = 4, 64, 1.5

# The share of the last call in the average time. Another program can make one call very
# long, which counts as twice the average. Calls without drafts are alike and rarely
# measured: one that is shorter by so much shows that the others were disturbed.
_TIME_RATE, _SHORTER = 0.25, 1.5


@flax.struct.dataclass
class GateMemory:
    """The memory of a gated drafter.

    Attributes:
      inner: the memory of the drafter.
      usual: tokens that a call with drafts yields, over the texts so far.
      tokens: tokens of calls with drafts, of which earlier ones count less.
      calls: number of these calls, counted in the same way.
      waits: number of calls since the last one with drafts.
      patience: number of such calls after which drafts are tried again.
      opens: whether the next call has drafts, the same in all rows that have run; a
        call has drafts if this is so in all rows.
      drafted: number of calls since the last one without drafts.
      clock: time at the beginning of the call, in microseconds modulo 2^32; 0 where
        programs know none.
      costs: microseconds of a call without and with drafts, the same in all rows that
        have run; 0 if unknown.
      pending: `Outcome.features` of the last tokens, of which the drafter has not
        learned, because that takes as long for one token as for several.
      fill: number of these tokens.
    """

    inner: PyTree
    usual: Float[Array, " B"]
    tokens: Float[Array, " B"]
    calls: Float[Array, " B"]
    waits: Int[Array, " B"]
    patience: Int[Array, " B"]
    opens: Bool[Array, " B"]
    drafted: Int[Array, " B"]
    clock: UInt[Array, " B"]
    costs: Float[Array, "B 2"]
    pending: Float[Array, "B L F"]
    fill: Int[Array, " B"]


@flax.struct.dataclass
class GateSeen:
    """What a gated drafter has seen: whether it drafts, and the certain token."""

    opens: Bool[Array, ""]
    first: Int[Array, " B"]
    inner: PyTree


@dataclasses.dataclass(frozen=True)
class GatedDrafter(WrappedDrafter):
    """Drafts while the calls of the rows yield more tokens than they cost.

    All rows of a batch share the time of a call, so that they draft together or not.

    Attributes:
      inner: a drafter on the device, whose trees have a single root, whose memory
        `look` does not change (none with `Part.reads_on`), and which learns from
        features alone.
      price: time of a call with drafts, divided by that of a call without, until this
        is measured.
      timed: whether it is measured, where programs know the time, and kept for later
        texts. The drafts of two runs may differ then, so that this is for exact
        acceptance and for models that compute the same numbers in passes of any size.
      kept: what was learned of earlier texts, by the number of rows of a batch: `usual`
        and `costs` of a row of the memory.
    """

    price: float
    timed: bool = True
    kept: dict[int, dict[str, np.ndarray]] = dataclasses.field(
        default_factory=dict, compare=False
    )

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """Those of the drafter, and 1 for calls without drafts."""
        return tuple(sorted({1, *self.inner.pass_sizes}))

    def start(self, arrays: PyTree, prompts: Prompts) -> GateMemory:
        """Begins with drafts, as if there were no earlier texts; see `recall`."""
        rows, features = prompts.lengths.shape, prompts.features
        return GateMemory(
            inner=self.inner.start(arrays, prompts),
            usual=jnp.full(rows, self.price + _CREDIT, jnp.float32),
            tokens=jnp.zeros(rows, jnp.float32),
            calls=jnp.zeros(rows, jnp.float32),
            waits=jnp.zeros(rows, jnp.int32),
            patience=jnp.full(rows, _PATIENCE, jnp.int32),
            opens=jnp.ones(rows, bool),
            drafted=jnp.zeros(rows, jnp.int32),
            clock=jnp.zeros(rows, jnp.uint32),
            costs=jnp.zeros((*rows, 2), jnp.float32),
            pending=jnp.zeros(
                (*rows, self.max_depth, features.shape[-1]), features.dtype
            ),
            fill=jnp.zeros(rows, jnp.int32),
        )

    def look(
        self, view: View, arrays: PyTree, memory: GateMemory
    ) -> tuple[GateSeen, GateMemory]:
        """Looks, unless drafts do not pay."""
        opens, first = memory.opens.all(), view.next_token
        now = self._now(view.lengths)
        # Nothing of the call comes before the clock is read.
        first, clock = jax.lax.optimization_barrier((first, now + memory.clock * 0))
        memory = dataclasses.replace(memory, clock=clock)

        def look() -> PyTree:
            some = dataclasses.replace(view, next_token=first)
            return self.inner.look(some, arrays, memory.inner)[0]

        nothing = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(look)
        )
        seen = jax.lax.cond(opens, look, lambda: nothing)
        return GateSeen(opens, first, seen), memory

    def _now(self, after: Array) -> UInt[Array, ""]:
        """The time once `after` is known; 0 where programs know none."""
        now = device_ops.current().microseconds(after) if self.timed else None
        return jnp.uint32(0) if now is None else now

    def _costs(
        self, memory: GateMemory, opened: Bool[Array, ""], now: UInt[Array, ""]
    ) -> Float[Array, "2"]:
        """The times of calls, with the one that ends now."""
        costs = memory.costs.max(0)
        known = costs[opened.astype(jnp.int32)]
        taken = (now - memory.clock.max()).astype(jnp.float32)
        average = known + _TIME_RATE * (jnp.minimum(taken, 2 * known) - known)
        disturbed = ~opened & (_SHORTER * taken < known)
        average = jnp.where((known == 0) | disturbed, taken, average)
        return jnp.where((jnp.arange(2) == opened) & (now > 0), average, costs)

    def propose(self, seen: GateSeen, arrays: PyTree) -> DraftTree:
        """The drafts, or the certain token alone."""

        def propose(inner: PyTree) -> DraftTree:
            return self.inner.propose(inner, arrays)

        tree = jax.eval_shape(propose, seen.inner)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
        alone = dataclasses.replace(
            blank,
            tokens=blank.tokens.at[:, 0].set(seen.first),
            parents=blank.parents - 1,
            valid=blank.valid.at[:, 0].set(True),
        )
        return jax.lax.cond(seen.opens, propose, lambda _: alone, seen.inner)

    def learn(self, arrays: PyTree, memory: GateMemory, outcome: Outcome) -> GateMemory:
        """Averages the tokens of calls with drafts, and decides about the next call."""
        opened, running = memory.opens.all(), outcome.count > 0
        drafts = (opened & running).astype(jnp.float32)
        usual = memory.usual + _USUAL_RATE * drafts * (outcome.count - memory.usual)
        decay = jnp.where(opened, _DECAY, 1.0)
        # A call that was a trial paid in the rows that gained.
        trial = opened & (memory.waits >= memory.patience)
        paid = outcome.count >= self._price(memory)
        longer = jnp.where(paid, _PATIENCE, 2 * memory.patience)
        memory = dataclasses.replace(
            memory,
            usual=usual,
            tokens=decay * memory.tokens + drafts * outcome.count,
            calls=decay * memory.calls + drafts,
            waits=jnp.where(opened, 0, memory.waits + 1),
            patience=jnp.where(trial, jnp.minimum(longer, _LONGEST), memory.patience),
            drafted=jnp.where(opened, memory.drafted + 1, 0),
        )
        opens = self._pays(memory, running)

        # Without drafts, tokens wait until they are many, or the next call has drafts.
        place = jnp.arange(self.max_depth) == memory.fill[:, None]
        first = outcome.features[:, :1].astype(memory.pending.dtype)
        pending = jnp.where(place[:, :, None], first, memory.pending)
        fill = memory.fill + outcome.count
        due = opened | opens | (fill >= self.max_depth).any()
        nothing: Any = None
        outcome = Outcome(
            tree=nothing,
            choices=nothing,
            count=jnp.where(opened, outcome.count, fill),
            features=jnp.where(opened, outcome.features, pending),
            hidden=nothing,
        )
        # The only condition that returns this memory, because XLA copies it.
        inner = jax.lax.cond(
            due,
            lambda inner: self.inner.learn(arrays, inner, outcome),
            lambda inner: inner,
            memory.inner,
        )
        ends = self._now(_parts_of((fill, inner)))
        costs = self._costs(memory, opened, ends)
        return dataclasses.replace(
            memory,
            inner=inner,
            opens=jnp.broadcast_to(opens, memory.opens.shape),
            costs=jnp.broadcast_to(costs, memory.costs.shape),
            pending=pending,
            fill=jnp.where(due, 0, fill),
        )

    def _price(self, memory: GateMemory) -> Float[Array, ""]:
        """The price as measured, or the one to begin with."""
        costs = memory.costs.max(0)
        measured = jnp.maximum(costs[1] / jnp.maximum(costs[0], 1.0), 1.0)
        return jnp.where(costs.min() > 0, measured, self.price)

    def _pays(self, memory: GateMemory, running: Bool[Array, " B"]) -> Bool[Array, ""]:
        """Whether the next call shall have drafts."""
        averages = jnp.where(running, _average(memory), 0.0)
        average = averages.sum() / jnp.maximum(running.sum(), 1)
        costs, price = memory.costs.max(0), self._price(memory)
        opens = (average >= price) | (memory.waits >= memory.patience).any()
        # Now and then two calls without drafts show how long that takes; a price that
        # seems low may be wrong.
        enough = jnp.where(costs[0] > 0, _FURTHER, _FIRST)
        unsure = average < _DOUBT * jnp.maximum(price, self.price)
        measures = (costs[1] > 0) & unsure & (memory.drafted.max() >= enough)
        second = self.timed & (memory.waits == 1).any()
        return opens & ~measures & ~second

    def entropies(self, seen: GateSeen) -> Float[Array, "B L"] | None:
        """Those of the drafter; NaN without drafts."""
        entropies = self.inner.entropies(seen.inner)
        if entropies is None:
            return None
        return jnp.where(seen.opens, entropies, jnp.nan)

    def recall(self, memory: GateMemory) -> GateMemory:
        """The memory before the first call, with what was learned of earlier texts."""
        rows = len(memory.usual)
        kept = {
            name: jnp.asarray(np.stack([value] * rows))
            for name, value in self.kept.get(rows, {}).items()
        }
        return dataclasses.replace(memory, **kept)

    def keep(self, memory: GateMemory) -> None:
        """Keeps what was learned of texts, if drafts may depend on it."""
        if not self.timed:
            return  # On a mesh of several processes, none can read the memory.
        ran = np.asarray(memory.calls) > 0
        if ran.any():
            self.kept[len(ran)] = {
                "usual": np.asarray(memory.usual)[ran].mean(0),
                "costs": np.asarray(memory.costs)[ran].max(0),
            }


def _average(memory: GateMemory) -> Float[Array, " B"]:
    """Tokens that a call with drafts is expected to yield."""
    total = _EARLIER * memory.usual + memory.tokens
    return total / (_EARLIER + memory.calls)


def _parts_of(tree: PyTree) -> Int[Array, " n"]:
    """Numbers that are known once all arrays are."""
    leaves = (x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.number))
    return jnp.concatenate([x.ravel()[:1].astype(jnp.int32) for x in leaves])
