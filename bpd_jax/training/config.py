"""What a training run is, as frozen dataclasses."""

import dataclasses

from bpd_jax.data.spec import TextTask
from bpd_jax.errors import UserError
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.partitioning import MeshConfig

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
        if not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
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
      head_weights: λ_h of each head in the loss; None for 1 each.
      start: name or folder of a trained model whose trunk, of the same sizes, the run
        begins with; None begins with random numbers. The heads are always new.
      log_every: steps between two rows of metrics, which average over them.
      evaluate_every: steps between two losses on the validation split.
      evaluate_batches: batches of one such loss; None for the whole split.
      checkpoint_every: steps between two checkpoints; the last step has one too.
      keep_checkpoints: how many of the newest checkpoints stay on disk.
    """

    model: BlockwiseConfig
    task: TextTask
    optimizer: OptimizerConfig
    batch_size: int
    length: int
    steps: int
    seed: int = 0
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    head_weights: tuple[float, ...] | None = None
    start: str | None = None
    log_every: int = 50
    evaluate_every: int = 500
    evaluate_batches: int | None = None
    checkpoint_every: int = 500
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        for name, kind in {
            "model": BlockwiseConfig,
            "task": TextTask,
            "optimizer": OptimizerConfig,
            "mesh": MeshConfig,
        }.items():
            if not isinstance(getattr(self, name), kind):
                raise UserError(
                    f"TrainConfig.{name} must be @{kind.__name__}(), not "
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
        if self.evaluate_batches is not None:
            _check_count("evaluate_batches", self.evaluate_batches)
        if not isinstance(self.seed, int) or self.seed < 0:
            raise UserError(
                f"TrainConfig.seed must be 0 or a positive integer, not {self.seed!r}."
            )
        if self.length > self.model.trunk.max_length:
            raise UserError(
                f"TrainConfig.length = {self.length} exceeds "
                f"TransformerConfig.max_length = {self.model.trunk.max_length}: lower "
                "the one or raise the other."
            )
        if self.model.heads is not None and self.model.heads.has_softmax:
            raise UserError(
                "BlockHeadsConfig.draft_vocabulary and own_softmax are for heads of a "
                "model that has been trained already (HeadsTrainConfig): leave them "
                "out."
            )
        if self.head_weights is not None:
            object.__setattr__(self, "head_weights", tuple(self.head_weights))
            if len(self.lambdas) != self.model.block_size or min(self.lambdas) < 0:
                raise UserError(
                    f"TrainConfig.head_weights = {self.head_weights} must hold "
                    f"{self.model.block_size} numbers, one per head, none negative."
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


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
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
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (above is None or value > above)
        and (least is None or value >= least)
    ):
        return
    bound = f"above {above}" if above is not None else f"of at least {least}"
    raise UserError(f"{owner}.{name} must be a number {bound}, not {value!r}.")
