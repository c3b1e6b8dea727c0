"""Schedules of the heads' weights in the loss.

These go beyond the paper, where λ_h = 1 for every head and step: λ that decays with the
distance of a head's prediction, heads that are added one after another, and a linear
ramp for each added head.

With heads added every 100 steps, a ramp of 50 steps and a decay of 0.5, in order of
distance:

    step       1   100   101   125   150   200   201   250   300
    λ_1        1     1     1     1     1     1     1     1     1
    λ_2        0     0  0.01  0.25   0.5   0.5   0.5   0.5   0.5
    λ_3        0     0     0     0     0     0 0.005  0.25  0.25

The state of a schedule is plain JSON; it is saved with each checkpoint, so that a
resumed run continues with the same schedule.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import (
    Count,
    Natural,
    Positive,
    Validated,
    choice,
    configurable,
    number,
)

ORDERS = ("distance", "entropy")

ScheduleState = dict[str, Any]


@configurable
@dataclasses.dataclass(frozen=True)
class HeadSchedule(Validated):
    """Factors on λ_h (paper, appendix C.1), which is 1 without a schedule.

    In the order `entropy`, the next head to be added is the one with the lowest mean
    entropy in the last evaluation; ties are broken in favour of the nearest head. It
    needs `waiting`: an untrained head is the model's own softmax (its second matrix is
    zero), so the entropies of all such heads equal that of head 1 and are not
    informative. A head with a small weight learns nearly as fast, because AdamW is
    invariant to the scale of a gradient, and hardly affects the trunk, where the
    gradients of all heads are summed. Its entropy then measures how predictable that
    token is from the trunk's states.

    Attributes:
      decay: λ_h is multiplied by decay^(h - 1).
      ramp_steps: steps over which the weight of an added head rises linearly to its
        full value; 0 for no ramp. Head 1 has no ramp.
      start_after: steps before the schedule begins: until then, only head 1 has its
        full weight.
      add_every: steps between two additions, and between `start_after` and the first
        one. None adds all heads after `start_after` steps.
      order: `distance` adds heads 2, 3, … L; `entropy` is described above.
      waiting: share of its weight that a head has before it is added. With 0 its layer
        learns nothing until then, while weight decay shrinks its first matrix.
    """

    decay: Positive = 1.0
    ramp_steps: Natural = 0
    start_after: Natural = 0
    add_every: Count | None = None
    order: Annotated[str, choice(*ORDERS)] = "distance"
    waiting: Annotated[float, number(0, 1)] = 0.0

    def check_together(self) -> None:
        if self.add_every is None and self.order != "distance":
            raise UserError(
                "HeadSchedule.order is for heads that are added one after another: set "
                "HeadSchedule.add_every too, or leave it out."
            )
        if self.waiting and not (self.add_every or self.start_after):
            raise UserError(
                "HeadSchedule.waiting is for heads that are added later: set "
                "HeadSchedule.add_every or start_after too, or leave it out."
            )
        if self.order == "entropy" and not self.waiting:
            raise UserError(
                "HeadSchedule.order = 'entropy' needs HeadSchedule.waiting above 0, "
                "such as 0.01: the entropy of an untrained head is not informative."
            )

    def start(self) -> ScheduleState:
        """The state before the first step."""
        return {"added": [], "entropies": None}

    def advance(
        self, state: ScheduleState, step: int, entropies: Sequence[float] | None = None
    ) -> ScheduleState:
        """Returns the state after a step; the argument is not modified.

        Only the order `entropy` changes the state. An addition that is due before the
        first evaluation is postponed until then.
        """
        if self.order != "entropy":
            return state
        assert self.add_every is not None
        measured = state["entropies"] if entropies is None else list(entropies)
        added = [list(entry) for entry in state["added"]]
        if measured is not None:
            present = {head for head, _ in added}
            missing = {*range(2, len(measured) + 1)} - present
            due = max(step - self.start_after, 0) // self.add_every
            for _ in range(len(added), due):
                if not missing:
                    break
                head = min(missing, key=lambda h: (measured[h - 1], h))
                missing.remove(head)
                added.append([head, step])
        return {"added": added, "entropies": measured}

    def weights(
        self, state: ScheduleState, step: int, base: Sequence[float]
    ) -> np.ndarray:
        """λ_h of a step, `[L]` float32.

        `state` is that after the preceding step; steps are counted from 1; `base` is
        λ_h without a schedule.
        """
        since: dict[int, int] = dict(state["added"])
        weights = []
        for head, weight in enumerate(base, start=1):
            after: int | None = self.start_after + (head - 1) * (self.add_every or 0)
            if self.order == "entropy":
                after = since.get(head)
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
