"""Which evaluation of a run was the best so far, and when to give up."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any


def lower_is_better(name: str) -> bool:
    """The direction of a column of validation metrics, by its name."""
    return "accuracy" not in name


def columns(num_heads: int) -> list[str]:
    """The columns of validation metrics that a run may be judged by."""
    kinds = ("loss", "accuracy", "entropy")
    return ["validation_loss"] + [
        f"validation_{kind}_head_{head}"
        for kind in kinds
        for head in range(1, num_heads + 1)
    ]


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is known after some evaluations; saved with every checkpoint, as JSON.

    Attributes:
      name: the column that decides.
      step: of the best evaluation; None before the first.
      value: of the column there.
      waited: evaluations since then.
      weights: λ_h, which make up `validation_loss`.
    """

    name: str
    step: int | None = None
    value: float | None = None
    waited: int = 0
    weights: tuple[float, ...] = ()

    def after(self, step: int, row: Mapping[str, float]) -> "Selection":
        """With one evaluation more; an equal one is not better, nor is a NaN."""
        value = row[self.name]
        sign = 1 if lower_is_better(self.name) else -1
        if not math.isnan(value) and (
            self.value is None or sign * value < sign * self.value
        ):
            return dataclasses.replace(self, step=step, value=value, waited=0)
        return dataclasses.replace(self, waited=self.waited + 1)

    def is_over(self, patience: int | None) -> bool:
        """Whether `patience` evaluations have passed without a better one."""
        return patience is not None and self.waited >= patience

    def among(self, steps: Collection[int]) -> "Selection":
        """A new start if the best checkpoint is not one of those that there are."""
        if self.step is None or self.step in steps:
            return self
        return Selection(self.name, weights=self.weights)

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(
        cls,
        saved: Mapping[str, Any] | None,
        name: str,
        weights: tuple[float, ...] = (),
    ) -> "Selection":
        """What was saved, as far as it says anything about this column.

        Of another column, or of a `validation_loss` of other weights, only the step
        stays: that checkpoint is kept until an evaluation has taken its place.
        """
        new = cls(name, weights=weights)
        if saved is None:
            return new
        same = saved["name"] == name and (
            name != "validation_loss" or tuple(saved.get("weights", ())) == weights
        )
        names = ("step", "value", "waited") if same else ("step",)
        return dataclasses.replace(new, **{key: saved[key] for key in names})

    def __str__(self) -> str:
        if self.value is None:
            return f"no {self.name} yet"
        return f"best {self.name} {self.value:.4g} at step {self.step:,}"
