"""Which evaluation of a run was the best so far, and when to give up."""

import dataclasses
import math
from collections.abc import Mapping
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
    """

    name: str
    step: int | None = None
    value: float | None = None
    waited: int = 0

    def after(self, step: int, row: Mapping[str, float]) -> "Selection":
        """With one evaluation more; an equal one is not better, nor is a NaN."""
        value = row[self.name]
        sign = 1 if lower_is_better(self.name) else -1
        if not math.isnan(value) and (
            self.value is None or sign * value < sign * self.value
        ):
            return Selection(self.name, step, value)
        return dataclasses.replace(self, waited=self.waited + 1)

    def is_over(self, patience: int | None) -> bool:
        """Whether `patience` evaluations have passed without a better one."""
        return patience is not None and self.waited >= patience

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any] | None, name: str) -> "Selection":
        """What was saved; a new start where there is nothing by this column."""
        if saved is None or saved["name"] != name:
            return cls(name)
        return cls(**saved)

    def __str__(self) -> str:
        if self.step is None:
            return f"no {self.name} yet"
        return f"best {self.name} {self.value:.4g} at step {self.step:,}"
