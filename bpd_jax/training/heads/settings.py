"""The settings of training heads or a block drafter on a frozen model."""

import dataclasses
import math
from typing import Annotated

from jax.sharding import Mesh

from bpd_jax.errors import UserError
from bpd_jax.models.attachments import DTYPES
from bpd_jax.models.config import BlockHeadsConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.partitioning import MeshConfig, check_rows
from bpd_jax.settings import (
    Count,
    Natural,
    NonNegative,
    Positive,
    Share,
    Validated,
    Words,
    choice,
    number,
)
from bpd_jax.training.config import OptimizerConfig

MODES = ("cache", "ring")
STATES_DTYPES = ("float16", "bfloat16")
PRODUCTS = ("float32", "bfloat16")
POSITION_WEIGHTS = ("equal", "decay", "dpace")


@dataclasses.dataclass(frozen=True)
class HeadsTrainConfig(Validated):
    """Everything that decides the heads that a run ends with, and its pace.

    Attributes:
      model: name or folder of the pretrained model, which stays as it is.
      data: folder of texts that it wrote itself; see `data.generations`.
      heads: what is trained: L heads, of which 2 … L are trained, or a block drafter.
        A draft vocabulary holds the tokens that the model wrote most often.
      start: folder of heads or a block drafter of the same sizes, as a training wrote
        it, whose parameters are the initial ones; None for random ones. It may have
        been trained on other texts or for another model of the same sizes.
      optimizer: of what is trained.
      batch_size: positions of a step; of a block drafter, anchors.
      epochs: passes over all positions, if `steps` is None.
      steps: of the whole run.
      head_weights: λ of heads 2 … L in the loss; None for those of `position_weights`.
      position_weights: λ of head j + 1, or of the guess j tokens ahead: `equal`, 1;
        `decay`, exp(-(j - 1) / position_decay), as DFlash; `dpace` (block drafters),
        see `drafter_objective.dpace_weights`. None is `decay` for a block drafter and
        `equal` for heads.
      position_decay: see `position_weights`.
      dpace_smoothing: α of D-PACE.
      anchors_per_row: A, anchors of a block drafter that share the states of a text.
      row_tokens: T, tokens of a row of a block drafter, at most; see `blocks`.
      train_texts: texts to train on, at most; the held-out ones stay the same. None
        for all.
      soft_targets: share, 0 to 1, of the targets that is what the model itself held
        for likely after the tokens before (Hydra's teacher loss); the rest is the
        token that it wrote. What is learnt from few texts holds better for others, at
        half as much time again.
      mode: `cache`: the model's states of all positions are computed first and kept on
        disk; `ring`: they are computed along the way, and only the latest are kept,
        in memory.
      states: folder of the cache; None for `states` in the run's folder.
      states_dtype: float16 or bfloat16, in which states are kept.
      ring_positions: how many states a ring holds.
      ring_uses: how often a state of a ring is drawn on average.
      include_prompts: whether positions and targets of the prompts count too.
      products: float32, or bfloat16 with sums in float32, which is faster: how matrices
        are multiplied.
      forward_tokens: tokens that the model reads at once to compute states.
      mesh: of the devices of this process that share a batch and the frozen model's
        parameters; what is trained is whole on each. None for one device.
      held_out: share of the texts that accuracies are measured on.
      held_out_positions: positions of those, at most.
      log_every: steps between two rows of metrics, which average over them.
      evaluate_every: steps between two measurements on held-out texts.
      checkpoint_every: steps between two checkpoints, which a killed run goes on from.
      heads_dtype: float32, bfloat16 or int8, in which the heads are stored.
      seed: of the parameters, the order of positions and the choice of held-out texts.
    """

    model: str
    data: str
    heads: BlockHeadsConfig | BlockDrafterConfig
    optimizer: OptimizerConfig
    start: Words | None = None
    batch_size: Count = 2048
    epochs: Positive = 4.0
    steps: Count | None = None
    head_weights: tuple[NonNegative, ...] | None = None
    position_weights: Annotated[str, choice(*POSITION_WEIGHTS)] | None = None
    position_decay: Positive = 4.0
    dpace_smoothing: Share = 0.5
    anchors_per_row: Count = 32
    row_tokens: Count = 512
    train_texts: Count | None = None
    soft_targets: Share = 0.0
    mode: Annotated[str, choice(*MODES)] = "cache"
    states: str | None = None
    states_dtype: Annotated[str, choice(*STATES_DTYPES)] = "float16"
    ring_positions: Count = 262_144
    ring_uses: Positive = 4.0
    include_prompts: bool = False
    products: Annotated[str, choice(*PRODUCTS)] = "float32"
    forward_tokens: Count = 4096
    mesh: MeshConfig | None = None
    held_out: Annotated[float, number(above=0, below=1)] = 0.02
    held_out_positions: Count = 16_384
    log_every: Count = 20
    evaluate_every: Count = 200
    checkpoint_every: Count = 200
    heads_dtype: Annotated[str, choice(*DTYPES)] = "bfloat16"
    seed: Natural = 0

    def check_together(self) -> None:
        """Raises a `UserError` for settings that contradict each other."""
        drafter = isinstance(self.heads, BlockDrafterConfig)
        if self.position_weights is None:
            weights = "decay" if drafter else "equal"
            object.__setattr__(self, "position_weights", weights)
        if self.position_weights == "dpace" and not drafter:
            raise UserError(
                "HeadsTrainConfig.position_weights = 'dpace' is for block drafters: "
                "set 'equal' or 'decay' for heads."
            )
        if drafter and self.mode != "cache":
            raise UserError(
                "HeadsTrainConfig.mode must be 'cache' for a block drafter, which "
                "reads the states of whole texts."
            )
        if isinstance(self.heads, BlockHeadsConfig):
            self._check_heads(self.heads)
        if self.head_weights is not None and len(self.lambdas) != self.levels:
            raise UserError(
                f"HeadsTrainConfig.head_weights = {self.head_weights} must hold "
                f"{self.levels} numbers, one per trained head."
            )

    def _check_heads(self, heads: BlockHeadsConfig) -> None:
        if self.soft_targets and (self.mode != "cache" or heads.own_softmax):
            raise UserError(
                "HeadsTrainConfig.soft_targets needs mode = 'cache', for the states of "
                "neighbouring positions, and heads without a softmax of their own."
            )
        if heads.num_heads < 2:
            raise UserError(
                "BlockHeadsConfig.num_heads = 1 leaves no head to train: head 1 is the "
                "model itself; give 2 or more."
            )
        if heads.first_has_ffn:
            raise UserError(
                "BlockHeadsConfig.first_has_ffn would change the output of the frozen "
                "model: leave it out."
            )

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises a `UserError` unless the devices can share out a batch."""
        name, rows = "HeadsTrainConfig.batch_size", self.batch_size
        if isinstance(self.heads, BlockDrafterConfig):
            name += " // HeadsTrainConfig.anchors_per_row"
            rows //= self.anchors_per_row
        check_rows(name, rows, mesh)

    @property
    def block_size(self) -> int:
        """L, tokens of a block."""
        if isinstance(self.heads, BlockDrafterConfig):
            return self.heads.block_size
        return self.heads.num_heads

    @property
    def levels(self) -> int:
        """Number of guesses of a block, L - 1."""
        return self.block_size - 1

    @property
    def lambdas(self) -> tuple[float, ...]:
        """λ of heads 2 … L, or of guesses 1 … L-1."""
        if self.head_weights is not None:
            return self.head_weights
        if self.position_weights != "decay":
            return (1.0,) * self.levels
        return tuple(math.exp(-j / self.position_decay) for j in range(self.levels))

    def steps_for(self, positions: int) -> int:
        """Steps of the whole run, given the number of positions of one pass."""
        if self.steps is not None:
            return self.steps
        return max(1, round(self.epochs * positions / self.batch_size))
