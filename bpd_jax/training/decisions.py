"""Best checkpoint, early stopping and head schedule, from the evaluations of a run."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, Self

from bpd_jax.training.config import TrainConfig
from bpd_jax.training.head_schedule import HeadSchedule

# Keys in the data item of a checkpoint.
_SELECTION, _HEAD_SCHEDULE = "selection", "head_schedule"


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
        sign = -1 if "accuracy" in self.name else 1  # The lowest other metric is best.
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


@dataclasses.dataclass
class Decisions:
    """The best checkpoint, whether to stop early, and the schedule of the heads.

    Attributes:
      config: settings of the run.
      selection: the best checkpoint so far.
      schedule_state: state of `TrainConfig.head_schedule`, as JSON.
      validation: metrics of the last evaluation; {} before the first one.
    """

    config: TrainConfig
    selection: Selection
    schedule_state: Any
    validation: dict[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def restore(
        cls, config: TrainConfig, saved: Mapping[str, Any], steps: Collection[int]
    ) -> Self:
        """Restores the decisions of a run.

        Args:
          config: settings of the run.
          saved: the data item of its checkpoint; {} at the beginning of a run.
          steps: the steps whose checkpoints exist.
        """
        selection = Selection.from_json(
            saved.get(_SELECTION), config.select_by, config.lambdas
        )
        schedule_state = saved.get(_HEAD_SCHEDULE) or _schedule(config).start()
        return cls(config, selection.among(steps), schedule_state)

    @property
    def is_over(self) -> bool:
        """Whether the run stops early."""
        return self.selection.is_over(self.config.patience)

    def lambdas(self, step: int) -> Any:
        """The weights λ_h of the heads in a step."""
        schedule = _schedule(self.config)
        return schedule.weights(self.schedule_state, step, self.config.lambdas)

    def after(
        self, step: int, validation: dict[str, float] | None
    ) -> tuple[int | None, bool]:
        """Takes a step into account; see `loop.run`."""
        entropies = None
        if validation is not None:
            self.validation = validation
            self.selection = self.selection.after(step, validation)
            entropies = [
                value
                for name, value in validation.items()
                if name.startswith("validation_entropy_head_")
            ]
        self.schedule_state = _schedule(self.config).advance(
            self.schedule_state, step, entropies
        )
        return self.selection.step, self.is_over

    def to_json(self) -> dict[str, Any]:
        """The state as JSON, for `restore`."""
        return {
            _SELECTION: self.selection.to_json(),
            _HEAD_SCHEDULE: self.schedule_state,
        }


def _schedule(config: TrainConfig) -> HeadSchedule:
    return config.head_schedule or HeadSchedule()
