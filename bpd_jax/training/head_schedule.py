"""How much each head counts in the loss, from the first step to the last.

Three things beyond the paper, where λ_h = 1 for every head and every step: λ that
decays with the distance a head looks ahead, heads that are added one after another, and
a linear ramp for each head that is added.

With heads added every 100 steps, a ramp of 50 steps and a decay of 0.5, in order of
distance:

    step       1   100   101   125   150   200   201   250   300
    λ_1        1     1     1     1     1     1     1     1     1
    λ_2        0     0  0.01  0.25   0.5   0.5   0.5   0.5   0.5
    λ_3        0     0     0     0     0     0 0.005  0.25  0.25

What a run has measured and decided so far, its *place*, is plain JSON: it is saved with
each checkpoint, so that a resumed run goes on as it would have.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from bpd_jax.errors import UserError
from bpd_jax.settings import Count, Natural, Positive, Validated, choice, number

ORDERS = ("distance", "entropy")

Place = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class HeadSchedule(Validated):
    """Factors on λ_h (paper, appendix C.1), which is 1 without a schedule.

    The order of entropy: at each addition the head comes next whose mean entropy was
    lowest in the last evaluation, that is, the one surest of its token; of equal ones
    the nearest. It needs `waiting`: a head that has not been trained at all is the
    model's own softmax (its second matrix is zero), so the entropies of all such heads
    are head 1's and say nothing of the tokens further ahead. A head with a small weight
    learns nearly as fast, because AdamW divides the scale of a gradient out, and hardly
    moves the trunk, where the gradients of all heads are added up. Its entropy is then
    a measurement: how much can be known of that token from this trunk's states.

    Attributes:
      decay: λ_h is multiplied by decay^(h - 1).
      ramp_steps: steps over which the weight of a head that comes in rises linearly, to
        all of it at the last of them; 0 for at once. Head 1 has no ramp.
      add_every: steps between two additions, the first addition included; head 1 is
        there from the start. None has all heads there from the start.
      order: `distance` adds heads 2, 3, … L; `entropy` see above.
      waiting: share of its weight that a head has before it is added. With 0 its layer
        learns nothing until then, while weight decay shrinks its first matrix.
    """

    decay: Positive = 1.0
    ramp_steps: Natural = 0
    add_every: Count | None = None
    order: Annotated[str, choice(*ORDERS)] = "distance"
    waiting: Annotated[float, number(0, 1)] = 0.0

    def check_together(self) -> None:
        """Raises a `UserError` for settings that need others."""
        if self.add_every is None and (self.order != "distance" or self.waiting):
            raise UserError(
                "HeadSchedule.order and waiting are for heads that are added one after "
                "another: set HeadSchedule.add_every too, or leave them out."
            )
        if self.order == "entropy" and not self.waiting:
            raise UserError(
                "HeadSchedule.order = 'entropy' needs HeadSchedule.waiting above 0, "
                "such as 0.01: the entropy of a head that is not trained at all says "
                "nothing."
            )

    @property
    def needs_entropies(self) -> bool:
        """Whether `advance` needs the results of evaluations."""
        return self.order == "entropy"

    def start(self) -> Place:
        """The place of a run before its first step."""
        return {"added": [], "entropies": None}

    def advance(
        self, state: Place, step: int, entropies: Sequence[float] | None = None
    ) -> Place:
        """The place after a step; the old one is left as it is.

        Only the order of entropy decides anything here. An addition that is due before
        the first evaluation waits for it.

        Args:
          state: after an earlier step.
          step: steps done so far.
          entropies: per head, if an evaluation followed this step; None if not.
        """
        if not self.needs_entropies:
            return state
        assert self.add_every is not None
        measured = state["entropies"] if entropies is None else list(entropies)
        added = [list(entry) for entry in state["added"]]
        if measured is not None:
            present = {head for head, _ in added}
            missing = {*range(2, len(measured) + 1)} - present
            for _ in range(len(added), step // self.add_every):
                if not missing:
                    break
                head = min(missing, key=lambda h: (measured[h - 1], h))
                missing.remove(head)
                added.append([head, step])
        return {"added": added, "entropies": measured}

    def weights(self, state: Place, step: int, base: Sequence[float]) -> np.ndarray:
        """λ_h of a step.

        Args:
          state: after the step before it.
          step: the step, counted from 1.
          base: λ_h without a schedule, for h = 1 … L.

        Returns:
          `[L]` float32.
        """
        since: dict[int, int] = dict(state["added"])
        weights = []
        for head, weight in enumerate(base, start=1):
            after: int | None = 0
            if self.order == "entropy":
                after = 0 if head == 1 else since.get(head)
            elif self.add_every is not None:
                after = (head - 1) * self.add_every
            share = 1.0 if head == 1 else self._share(step, after)
            weights.append(weight * self.decay ** (head - 1) * share)
        return np.array(weights, np.float32)

    def _share(self, step: int, after: int | None) -> float:
        """The share of its weight that a head has at `step` if added after `after`."""
        if after is None or step <= after:
            return self.waiting
        if not self.ramp_steps:
            return 1.0
        risen = min((step - after) / self.ramp_steps, 1.0)
        return self.waiting + (1 - self.waiting) * risen
