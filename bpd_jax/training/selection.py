"""Selection of the best checkpoint of a run, and early stopping."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any


def lower_is_better(name: str) -> bool:
    """Whether lower values of a validation metric are better."""
    return "accuracy" not in name


def columns(num_heads: int) -> list[str]:
    """Names of the validation metrics that can select the best checkpoint."""
    kinds = ("loss", "accuracy", "entropy")
    return ["validation_loss"] + [
        f"validation_{kind}_head_{head}"
        for kind in kinds
        for head in range(1, num_heads + 1)
    ]


@dataclasses.dataclass(frozen=True)
class Selection:
    """The best evaluation so far; saved with every checkpoint as JSON.

    Attributes:
      name: name of the validation metric that selects.
      step: step of the best evaluation; None before the first one.
      value: the metric at that step.
      waited: number of evaluations since then.
      weights: λ_h, on which `validation_loss` depends.
    """

    name: str
    step: int | None = None
    value: float | None = None
    waited: int = 0
    weights: tuple[float, ...] = ()

    def after(self, step: int, row: Mapping[str, float]) -> "Selection":
        """The selection after another evaluation; equal values and NaN do not improve.

        Args:
          step: step of the evaluation.
          row: its validation metrics.
        """
        value = row[self.name]
        sign = 1 if lower_is_better(self.name) else -1
        if not math.isnan(value) and (
            self.value is None or sign * value < sign * self.value
        ):
            return dataclasses.replace(self, step=step, value=value, waited=0)
        return dataclasses.replace(self, waited=self.waited + 1)

    def is_over(self, patience: int | None) -> bool:
        """Whether the last `patience` evaluations brought no improvement."""
        return patience is not None and self.waited >= patience

    def among(self, steps: Collection[int]) -> "Selection":
        """The selection, reset if the best checkpoint is not among `steps`."""
        if self.step is None or self.step in steps:
            return self
        return Selection(self.name, weights=self.weights)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(
        cls,
        saved: Mapping[str, Any] | None,
        name: str,
        weights: tuple[float, ...] = (),
    ) -> "Selection":
        """Restores a saved selection.

        If the metric or the weights of `validation_loss` have changed since, only the
        step is restored, so that this checkpoint is kept until the next evaluation.

        Args:
          saved: a result of `to_json`; None for a new selection.
          name: name of the validation metric.
          weights: λ_h.
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
