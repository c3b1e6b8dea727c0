"""Drafting only while it pays.

On a CPU a serial call that verifies drafts takes noticeably longer than one that
decodes a single token, so that drafts which are rarely accepted make decoding slower.
A gated drafter follows how many tokens its calls yield, and stops drafting while they
yield less than plain decoding would in the same time. Now and then it tries again.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int, PyTree
from bpd_jax.drafting.draft_tree import DraftTree
from bpd_jax.drafting.interface import Outcome, Prompts, View
from bpd_jax.drafting.wrapped import WrappedDrafter

# The share of the last call in the average of a row; the tokens by which the average
# begins above the price; calls without drafts until one with drafts is tried.
_RATE, _CREDIT, _PATIENCE = 0.25, 1.0, 16


@flax.struct.dataclass
class GateMemory:
    """The memory of a gated drafter.

    Attributes:
      inner: the memory of the drafter.
      gains: average number of tokens of a call with drafts; 0 in finished rows.
      waits: number of calls since the last one with drafts.
      opened: whether the last call had drafts, the same in all rows.
    """

    inner: PyTree
    gains: Float[Array, " B"]
    waits: Int[Array, " B"]
    opened: Bool[Array, " B"]


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
      inner: a drafter on the device, whose trees have a single root, and whose memory
        `look` does not change (`Part.reads_on`).
      price: time of a call with drafts, divided by that of a call without.
    """

    price: float

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """Those of the drafter, and 1 for calls without drafts."""
        return tuple(sorted({1, *self.inner.pass_sizes}))

    def start(self, arrays: PyTree, prompts: Prompts) -> GateMemory:
        """Begins with drafts."""
        rows = prompts.lengths.shape
        return GateMemory(
            inner=self.inner.start(arrays, prompts),
            gains=jnp.full(rows, self.price + _CREDIT, jnp.float32),
            waits=jnp.zeros(rows, jnp.int32),
            opened=jnp.ones(rows, bool),
        )

    def look(
        self, view: View, arrays: PyTree, memory: GateMemory
    ) -> tuple[GateSeen, GateMemory]:
        """Looks, unless drafts do not pay."""
        running = memory.gains > 0
        average = memory.gains.sum() / jnp.maximum(running.sum(), 1)
        opens = (average >= self.price) | (memory.waits >= _PATIENCE).any()

        def look(inner: PyTree) -> tuple[PyTree, PyTree]:
            return self.inner.look(view, arrays, inner)

        seen, _ = jax.eval_shape(look, memory.inner)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), seen)
        seen, inner = jax.lax.cond(opens, look, lambda x: (nothing, x), memory.inner)
        opened = jnp.broadcast_to(opens, memory.opened.shape)
        memory = dataclasses.replace(memory, inner=inner, opened=opened)
        return GateSeen(opens, view.next_token, seen), memory

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
        gains = memory.gains + _RATE * (outcome.count - memory.gains)
        gains = jnp.where(memory.opened, gains, memory.gains)
        return GateMemory(
            inner=self.inner.learn(arrays, memory.inner, outcome),
            gains=jnp.where(outcome.count > 0, gains, 0.0),
            waits=jnp.where(memory.opened, 0, memory.waits + 1),
            opened=memory.opened,
        )

    def entropies(self, seen: GateSeen) -> Float[Array, "B L"] | None:
        """Those of the drafter; NaN without drafts."""
        entropies = self.inner.entropies(seen.inner)
        if entropies is None:
            return None
        return jnp.where(seen.opens, entropies, jnp.nan)
