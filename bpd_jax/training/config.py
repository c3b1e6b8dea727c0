"""What a training run is, as frozen dataclasses."""

import dataclasses
import math
from typing import TypeGuard

from bpd_jax.data.example_task import DataTask, ExampleTask
from bpd_jax.data.text_task import TextTask
from bpd_jax.errors import UserError
from bpd_jax.models.compute import ComputeConfig
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.partitioning import MeshConfig
from bpd_jax.training.head_schedule import HeadSchedule
from bpd_jax.training.loss import TARGETS
from bpd_jax.training.selection import columns

SCHEDULES = ("cosine", "linear", "constant")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warmup, a schedule and clipping of the global gradient norm.

    Attributes:
      learning_rate: its highest value, reached after the warmup.
      warmup_steps: steps over which it rises linearly from 0.
      schedule: what follows until the last step: `cosine` or `linear` decay to
        `final_fraction` of the highest value, or `constant`.
      final_fraction: see `schedule`.
      weight_decay: decoupled, of kernels and embeddings only.
      beta1: decay rate of the mean of the gradients.
      beta2: decay rate of the mean of their squares.
      clip_norm: largest global norm of the gradients; None for no limit.
      trunk_learning_rate: the highest value of the trunk, in place of `learning_rate`,
        which is then that of the heads: for a trunk that has been trained already.
    """

    learning_rate: float
    warmup_steps: int = 0
    schedule: str = "cosine"
    final_fraction: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.98
    clip_norm: float | None = 1.0
    trunk_learning_rate: float | None = None

    def __post_init__(self) -> None:
        _check_number("OptimizerConfig", "learning_rate", self.learning_rate, above=0)
        if not _is_whole(self.warmup_steps) or self.warmup_steps < 0:
            raise UserError(
                "OptimizerConfig.warmup_steps must be 0 or a positive integer, not "
                f"{self.warmup_steps!r}."
            )
        if self.schedule not in SCHEDULES:
            raise UserError(
                f"OptimizerConfig.schedule must be one of {', '.join(SCHEDULES)}, not "
                f"{self.schedule!r}."
            )
        for name in ("final_fraction", "weight_decay", "beta1", "beta2"):
            _check_number("OptimizerConfig", name, getattr(self, name), least=0)
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise UserError(f"OptimizerConfig.{name} must be below 1.")
        if self.clip_norm is not None:
            _check_number("OptimizerConfig", "clip_norm", self.clip_norm, above=0)
        rate = self.trunk_learning_rate
        if rate is not None:
            _check_number("OptimizerConfig", "trunk_learning_rate", rate, above=0)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the parameters that a run ends with, and its pace.

    Attributes:
      model: sizes; its vocabulary must have as many tokens as the task's.
      task: corpus and vocabulary.
      optimizer: of all parameters, trunk and heads together.
      batch_size: rows of a step over all devices, B.
      length: tokens of a row, T.
      steps: of the whole run; a finished run goes on when this is raised.
      seed: of the initial parameters and of the order of the rows.
      mesh: how the devices share the work.
      compute: how a step computes; it may change when a run goes on.
      head_weights: λ_h of each head in the loss; None for 1 each.
      head_schedule: how λ_h change with the steps; None for not at all.
      head_targets: what heads 2 to L learn: the `text`, or what the `model` itself
        holds for likeliest there; see `blockwise_loss`.
      start: name or folder of a trained model whose trunk, of the same sizes, the run
        begins with, and whose heads too if they are of the same kind and sizes; of a
        run, its best checkpoint. None begins with random numbers.
      log_every: steps between two rows of metrics, which average over them.
      evaluate_every: steps between two losses on the validation split.
      evaluate_batches: batches of one such loss; None for the whole split.
      select_by: the column of the validation metrics whose best checkpoint is kept and
        decodes: of an accuracy the highest, of anything else the lowest.
      patience: evaluations without a better one after which the run ends early; None
        for never.
      checkpoint_every: steps between two checkpoints; the last step has one too, and
        every evaluation better than all before.
      keep_checkpoints: how many of the newest checkpoints stay on disk, with the best.
    """

    model: BlockwiseConfig
    task: DataTask
    optimizer: OptimizerConfig
    batch_size: int
    length: int
    steps: int
    seed: int = 0
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    head_weights: tuple[float, ...] | None = None
    head_schedule: HeadSchedule | None = None
    head_targets: str = "text"
    start: str | None = None
    log_every: int = 50
    evaluate_every: int = 500
    evaluate_batches: int | None = None
    select_by: str = "validation_loss"
    patience: int | None = None
    checkpoint_every: int = 500
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        for name, kind in {
            "model": BlockwiseConfig,
            "task": TextTask | ExampleTask,
            "optimizer": OptimizerConfig,
            "mesh": MeshConfig,
            "compute": ComputeConfig,
        }.items():
            if not isinstance(getattr(self, name), kind):
                kinds = [part.__name__ for part in getattr(kind, "__args__", [kind])]
                raise UserError(
                    f"TrainConfig.{name} must be @{'() or @'.join(kinds)}(), not "
                    f"{getattr(self, name)!r}."
                )
        for name in (
            "batch_size",
            "length",
            "steps",
            "log_every",
            "evaluate_every",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            _check_count(name, getattr(self, name))
        for name in ("evaluate_batches", "patience"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if not _is_whole(self.seed) or self.seed < 0:
            raise UserError(
                f"TrainConfig.seed must be 0 or a positive integer, not {self.seed!r}."
            )
        for name in ("dtype", "param_dtype"):
            if getattr(self.model.trunk, name) == "float16":
                raise UserError(
                    f"TransformerConfig.{name} = 'float16' rounds most gradients to 0: "
                    "set 'bfloat16' or 'float32'."
                )
        if self.start is not None and not (self.start and isinstance(self.start, str)):
            raise UserError(
                "TrainConfig.start must be the name or folder of a model, or None, not "
                f"{self.start!r}."
            )
        if self.length > self.model.trunk.max_length:
            raise UserError(
                f"TrainConfig.length = {self.length} exceeds "
                f"TransformerConfig.max_length = {self.model.trunk.max_length}: lower "
                "the one or raise the other."
            )
        heads = self.model.heads
        if heads is not None and (heads.has_softmax or heads.is_conditioned):
            raise UserError(
                "BlockHeadsConfig.draft_vocabulary, own_softmax, reads_anchor and "
                "feature_layers are for heads of a model that has been trained already "
                "(HeadsTrainConfig): leave them out."
            )
        if self.head_weights is not None:
            weights = self.head_weights
            if (
                not isinstance(weights, list | tuple)
                or len(weights) != self.model.block_size
                or not all(_is_number(weight) and weight >= 0 for weight in weights)
            ):
                raise UserError(
                    f"TrainConfig.head_weights = {weights!r} must hold "
                    f"{self.model.block_size} numbers, one per head, none negative."
                )
            object.__setattr__(self, "head_weights", tuple(weights))
        if self.head_schedule is not None and not isinstance(
            self.head_schedule, HeadSchedule
        ):
            raise UserError(
                "TrainConfig.head_schedule must be @HeadSchedule() or None, not "
                f"{self.head_schedule!r}."
            )
        for name, known in {
            "head_targets": TARGETS,
            "select_by": columns(self.model.block_size),
        }.items():
            if getattr(self, name) not in known:
                raise UserError(
                    f"TrainConfig.{name} must be one of {', '.join(known)}, not "
                    f"{getattr(self, name)!r}."
                )

    @property
    def lambdas(self) -> tuple[float, ...]:
        """λ_h for h = 1 … L."""
        if self.head_weights is None:
            return (1.0,) * self.model.block_size
        return self.head_weights

    @property
    def tokens_per_step(self) -> int:
        """Positions of one batch, B × T."""
        return self.batch_size * self.length


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _check_count(name: str, value: object) -> None:
    if not _is_whole(value) or value < 1:
        raise UserError(
            f"TrainConfig.{name} must be a positive integer, not {value!r}."
        )


def _check_number(
    owner: str,
    name: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
) -> None:
    if (
        _is_number(value)
        and (above is None or value > above)
        and (least is None or value >= least)
    ):
        return
    bound = f"above {above}" if above is not None else f"of at least {least}"
    raise UserError(f"{owner}.{name} must be a number {bound}, not {value!r}.")
