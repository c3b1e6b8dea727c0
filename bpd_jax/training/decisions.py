"""What a run decides from its evaluations, besides its parameters."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Self

from bpd_jax.training.config import TrainConfig
from bpd_jax.training.head_schedule import HeadSchedule
from bpd_jax.training.selection import Selection

# Keys in the data item of a checkpoint.
_SELECTION, _HEAD_SCHEDULE = "selection", "head_schedule"


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
        """What `restore` reads."""
        return {
            _SELECTION: self.selection.to_json(),
            _HEAD_SCHEDULE: self.schedule_state,
        }


def _schedule(config: TrainConfig) -> HeadSchedule:
    return config.head_schedule or HeadSchedule()
