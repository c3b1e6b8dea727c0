"""Drafting only while it pays.

On a CPU a serial call that verifies drafts takes noticeably longer than one that
decodes a single token, so that drafts which are rarely accepted make decoding slower.
A gated drafter follows how many tokens its calls yield, and stops drafting while they
yield less than plain decoding would in the same time. Now and then it tries again. How
long both kinds of calls take it reads from a clock, where the program can read one.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int, PyTree, UInt
from bpd_jax.drafting.draft_tree import DraftTree
from bpd_jax.drafting.interface import Outcome, Prompts, View
from bpd_jax.drafting.wrapped import WrappedDrafter
from bpd_jax.models import cpu

# The share of the last call in the average of a row, and the tokens by which the
# average begins above the price.
_RATE, _CREDIT = 0.25, 1.0

# Calls without drafts until one with drafts is tried; twice as many after each trial
# that did not pay, up to the second number.
_PATIENCE, _LONGEST = 16, 128

# Calls with drafts before the first and each further one that is made without, only to
# know its time, unless calls yield more tokens than this multiple of the price.
_FIRST, _FURTHER, _DOUBT = 4, 32, 1.5

# Other programs make some calls longer and none shorter: a shorter time counts at once,
# a longer one, cut at twice the known one, with this share.
_SLOWLY = 0.1


@flax.struct.dataclass
class GateMemory:
    """The memory of a gated drafter.

    Attributes:
      inner: the memory of the drafter.
      gains: average number of tokens of a call with drafts; 0 in finished rows.
      waits: number of calls since the last one with drafts.
      patience: number of such calls after which drafts are tried again.
      opened: whether the last call had drafts, the same in all rows.
      drafted: number of calls since the last one without drafts.
      clock: time at the beginning of the last call; 0 if there was none.
      costs: microseconds of a call without and with drafts, the same in all rows that
        have run; 0 if unknown.
      pending: `Outcome.features` of the last tokens, of which the drafter has not
        learned, because that takes as long for one token as for several.
      fill: number of these tokens.
    """

    inner: PyTree
    gains: Float[Array, " B"]
    waits: Int[Array, " B"]
    patience: Int[Array, " B"]
    opened: Bool[Array, " B"]
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
        `look` does not change (`Part.reads_on`), and which learns from features alone.
      price: time of a call with drafts, divided by that of a call without, where or
        until this is not measured.
    """

    price: float

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """Those of the drafter, and 1 for calls without drafts."""
        return tuple(sorted({1, *self.inner.pass_sizes}))

    def start(self, arrays: PyTree, prompts: Prompts) -> GateMemory:
        """Begins with drafts."""
        rows = prompts.lengths.shape
        width, dtype = 0, jnp.dtype("float32")
        if prompts.features is not None:
            width, dtype = prompts.features.shape[-1], prompts.features.dtype
        return GateMemory(
            inner=self.inner.start(arrays, prompts),
            gains=jnp.full(rows, self.price + _CREDIT, jnp.float32),
            waits=jnp.zeros(rows, jnp.int32),
            patience=jnp.full(rows, _PATIENCE),
            opened=jnp.ones(rows, bool),
            drafted=jnp.zeros(rows, jnp.int32),
            clock=jnp.zeros(rows, jnp.uint32),
            costs=jnp.zeros((*rows, 2), jnp.float32),
            pending=jnp.zeros((*rows, self.max_depth, width), dtype),
            fill=jnp.zeros(rows, jnp.int32),
        )

    def look(
        self, view: View, arrays: PyTree, memory: GateMemory
    ) -> tuple[GateSeen, GateMemory]:
        """Looks, unless drafts do not pay."""
        running = memory.gains > 0
        average = memory.gains.sum() / jnp.maximum(running.sum(), 1)
        memory, price = self._timed(view, memory)
        opens = (average >= price) | (memory.waits >= memory.patience).any()
        known = memory.costs.max(0)
        enough = jnp.where(known[0] > 0, _FURTHER, _FIRST)
        unsure = (known[1] > 0) & (average < _DOUBT * price)
        opens &= ~(unsure & (memory.drafted.max() >= enough))

        def look(inner: PyTree) -> tuple[PyTree, PyTree]:
            waiting = (memory.fill > 0).any()
            pending = memory.pending, memory.fill
            inner = self._learned(arrays, inner, *pending, when=waiting)
            return self.inner.look(view, arrays, inner)

        seen, _ = jax.eval_shape(look, memory.inner)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), seen)
        seen, inner = jax.lax.cond(opens, look, lambda x: (nothing, x), memory.inner)
        opened = jnp.broadcast_to(opens, memory.opened.shape)
        fill = jnp.where(opens, 0, memory.fill)
        memory = dataclasses.replace(memory, inner=inner, opened=opened, fill=fill)
        return GateSeen(opens, view.next_token, seen), memory

    def _timed(
        self, view: View, memory: GateMemory
    ) -> tuple[GateMemory, Float[Array, ""]]:
        """The memory with the time of the last call, and the price."""
        price = jnp.float32(self.price)
        timed = getattr(view.model, "times_calls", False)
        now = cpu.microseconds(view.lengths) if timed else None
        if now is None:
            return memory, price
        # Rows of a batch that have been refilled have no last call.
        before, costs = memory.clock.max(), memory.costs.max(0)
        drafted = (memory.opened & (memory.clock > 0)).any()
        last = costs[drafted.astype(jnp.int32)]
        taken = jnp.maximum((now - before).astype(jnp.float32), 1.0)
        longer = last + _SLOWLY * (jnp.minimum(taken, 2 * last) - last)
        last = jnp.where((last == 0) | (taken < last), taken, longer)
        changed = (jnp.arange(2) == drafted) & (before > 0)
        costs = jnp.where(changed, last, costs)
        memory = dataclasses.replace(
            memory,
            clock=jnp.full_like(memory.clock, now),
            costs=jnp.broadcast_to(costs, memory.costs.shape),
        )
        measured = jnp.maximum(costs[1] / jnp.maximum(costs[0], 1.0), 1.0)
        return memory, jnp.where(costs.min() > 0, measured, price)

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
        """Averages the tokens of calls with drafts."""
        opened = memory.opened
        gains = memory.gains + _RATE * (outcome.count - memory.gains)
        gains = jnp.where(opened, gains, memory.gains)
        # A row has waited if this call was its trial, which paid if the row gained.
        waited = opened & (memory.waits >= memory.patience)
        gained = gains > memory.gains
        longer = jnp.where(gained, _PATIENCE, 2 * memory.patience)

        place = jnp.arange(self.max_depth) == memory.fill[:, None]
        first = outcome.features[:, :1].astype(memory.pending.dtype)
        pending = jnp.where(place[:, :, None], first, memory.pending)
        fill = memory.fill + outcome.count
        due = opened.any() | (fill >= self.max_depth).any()
        features = jnp.where(opened[:, None, None], outcome.features, pending)
        counts = jnp.where(opened, outcome.count, fill)
        return dataclasses.replace(
            memory,
            inner=self._learned(arrays, memory.inner, features, counts, when=due),
            pending=pending,
            fill=jnp.where(due, 0, fill),
            gains=jnp.where(outcome.count > 0, gains, 0.0),
            waits=jnp.where(opened, 0, memory.waits + 1),
            patience=jnp.where(waited, jnp.minimum(longer, _LONGEST), memory.patience),
            drafted=jnp.where(opened, memory.drafted + 1, 0),
        )

    def _learned(
        self,
        arrays: PyTree,
        memory: PyTree,
        features: Float[Array, "B L F"],
        counts: Int[Array, " B"],
        *,
        when: Bool[Array, ""],
    ) -> PyTree:
        """The memory of the drafter, which learns of tokens by their features alone."""
        nothing: Any = None
        outcome = Outcome(nothing, nothing, counts, features, nothing)
        return jax.lax.cond(
            when, lambda x: self.inner.learn(arrays, x, outcome), lambda x: x, memory
        )

    def entropies(self, seen: GateSeen) -> Float[Array, "B L"] | None:
        """Those of the drafter; NaN without drafts."""
        entropies = self.inner.entropies(seen.inner)
        if entropies is None:
            return None
        return jnp.where(seen.opens, entropies, jnp.nan)
