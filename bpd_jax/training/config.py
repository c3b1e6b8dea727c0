"""The settings of a training run, as frozen dataclasses."""

import dataclasses
from typing import Annotated

from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import (
    Count,
    Natural,
    NonNegative,
    Path,
    Positive,
    Validated,
    check_value,
    choice,
    configurable,
    number,
)
from bpd_jax.data.example_task import DataTask
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.mesh import MeshConfig
from bpd_jax.models.partitioning import row_parts
from bpd_jax.models.transformer_config import ComputeConfig
from bpd_jax.training.loss import BlockwiseLoss, LossSettings


def columns(num_heads: int) -> list[str]:
    """Names of the validation metrics that can select the best checkpoint."""
    kinds = ("loss", "accuracy", "entropy")
    return ["validation_loss"] + [
        f"validation_{kind}_head_{head}"
        for kind in kinds
        for head in range(1, num_heads + 1)
    ]


@configurable
@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Validated):
    """AdamW with warmup, a schedule and clipping of the global gradient norm.

    Attributes:
      learning_rate: highest learning rate, reached after the warmup.
      warmup_steps: steps over which the learning rate rises linearly from 0; below 1,
        their share of all steps.
      schedule: schedule after the warmup: `cosine` or `linear` decay to
        `final_fraction` of the highest learning rate, or `constant`.
      final_fraction: see `schedule`.
      weight_decay: decoupled weight decay of kernels and embeddings.
      beta1: decay rate of the mean of the gradients.
      beta2: decay rate of the mean of their squares.
      clip_norm: largest global norm of the gradients; None for no limit.
      trunk_learning_rate: highest learning rate of the trunk, if it has been trained
        already and should change less than the heads, which use `learning_rate`.
    """

    learning_rate: Positive
    warmup_steps: NonNegative = 0
    schedule: Annotated[str, choice("cosine", "linear", "constant")] = "cosine"
    final_fraction: NonNegative = 0.1
    weight_decay: NonNegative = 0.0
    beta1: Annotated[float, number(0, 1)] = 0.9
    beta2: Annotated[float, number(0, 1)] = 0.98
    clip_norm: Positive | None = 1.0
    trunk_learning_rate: Positive | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenConfig(Validated):
    """The settings of a run that trains something for a frozen model.

    Attributes:
      optimizer: optimizer of the trained parameters.
      batch_size: positions, anchors of a block drafter, or rows per step; what None
        means depends on the kind of run, and likewise for `steps`.
      steps: number of steps of the whole run.
      seed: seed of the parameters, the order of the data and the held-out texts.
      log_every: steps between two rows of metrics, which are averages over them.
      evaluate_every: steps between two evaluations on held-out data.
      checkpoint_every: steps between two checkpoints.
    """

    optimizer: OptimizerConfig
    batch_size: Count | None = None
    steps: Count | None = None
    seed: Natural = 0
    log_every: Count = 20
    evaluate_every: Count = 200
    checkpoint_every: Count = 200

    def check_together(self) -> None:
        if self.optimizer.trunk_learning_rate is not None:
            raise UserError(
                "OptimizerConfig.trunk_learning_rate is for the training of a whole "
                "model; here the trunk is frozen: leave it out."
            )


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(LossSettings):
    """The settings of a run.

    Attributes:
      model: configuration of the model; its vocabulary size must be that of the task.
      task: corpus and vocabulary.
      optimizer: optimizer of all parameters, trunk and heads together.
      batch_size: B, rows of a step over all devices.
      length: T, tokens of a row.
      steps: steps of the whole run; a finished run continues if this is raised.
      seed: seed of the initial parameters and of the order of the rows.
      mesh: sharding over devices.
      compute: trade-offs of memory and time; may change when a run resumes.
      head_weights: λ_h of each head in the loss; None for 1 each.
      start: name or folder of a trained model that initialises the trunk, which must
        have the same sizes (except `max_length` with rotary positions), and the heads
        if they have the same kind and sizes; for a run its best checkpoint. None
        initialises at random.
      log_every: steps between two rows of metrics, which are averages over them.
      evaluate_every: steps between two losses on the validation split.
      evaluate_batches: batches of one such loss; None for the whole split.
      select_by: the validation metric that selects the best checkpoint, which is kept
        and used for decoding: the highest accuracy, or the lowest value of another
        metric.
      patience: number of evaluations without improvement after which the run ends;
        None for no limit.
      checkpoint_every: steps between two checkpoints; there is also one after the last
        step and after every improvement.
      keep_checkpoints: number of newest checkpoints to keep, besides the best one.
    """

    model: BlockwiseConfig
    task: DataTask
    optimizer: OptimizerConfig
    batch_size: Count
    length: Count
    steps: Count
    seed: Natural = 0
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    head_weights: tuple[NonNegative, ...] | None = None
    start: Path | None = None
    log_every: Count = 50
    evaluate_every: Count = 500
    evaluate_batches: Count | None = None
    select_by: str = "validation_loss"
    patience: Count | None = None
    checkpoint_every: Count = 500
    keep_checkpoints: Count = 2

    def check_together(self) -> None:
        for name in ("dtype", "param_dtype"):
            if getattr(self.model.trunk, name) == "float16":
                raise UserError(
                    f"TransformerConfig.{name} = 'float16' rounds most gradients to 0: "
                    "set 'bfloat16' or 'float32'."
                )
        if self.model.trunk.logit_softcap is not None:
            raise UserError(
                "TransformerConfig.logit_softcap is for models that have been trained "
                "already: the loss has none; leave it out."
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
        weights = self.head_weights
        if weights is not None and len(weights) != self.model.num_losses:
            raise UserError(
                f"TrainConfig.head_weights = {weights!r} must hold "
                f"{self.model.num_losses} numbers, one per head."
            )
        check_value(
            "TrainConfig.select_by",
            self.select_by,
            choice(*columns(self.model.num_losses)),
        )

    def check_mesh(self, mesh: Mesh) -> None:
        """Checks that the devices divide the batch evenly."""
        parts = row_parts(mesh) * self.compute.accumulate
        if self.batch_size % parts:
            raise UserError(
                f"TrainConfig.batch_size = {self.batch_size} is not a multiple of "
                f"data × fsdp × ComputeConfig.accumulate = {parts}, the number of "
                "parts that it is split into."
            )

    @property
    def lambdas(self) -> tuple[float, ...]:
        """λ_h for h = 1 … L."""
        if self.head_weights is None:
            return (1.0,) * self.model.num_losses
        return self.head_weights

    def loss(self, mesh: Mesh | None) -> BlockwiseLoss:
        """The loss on a mesh."""
        settings = LossSettings(
            self.head_targets, self.anchors_per_row, self.positions_per_row
        )
        return BlockwiseLoss(self.model, self.compute, settings, mesh)

    @property
    def tokens_per_step(self) -> int:
        """Positions of one batch, B × T."""
        return self.batch_size * self.length
