"""The settings of a refiner and its training."""

import dataclasses
from typing import Annotated

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Count, Natural, Positive, Validated, choice
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.trained_refiners import REFINER_KINDS, RefinerConfig
from bpd_jax.models.transformer_config import Rank, Size

TARGETS = ("model", "text")


@dataclasses.dataclass(frozen=True)
class RefinerSettings(Validated):
    """A refiner and its training; every field is a flag of `bpd_jax.train_refiner`.

    Attributes:
      kind: `markov`, `recurrent` or `hydra`.
      targets: training targets: `model` for the model's own next tokens, which are what
        verification accepts, or `text` for the tokens of the text.
      steps: number of training steps.
      batch_size: rows of a step, or positions of cached states; None for 16 rows or
        2048 positions.
      learning_rate: highest learning rate, after a short warmup and before a cosine
        decay.
      rank: rank of the correction; None for the default of the kind.
      width: width of the recurrent state or of a Hydra head's layer; None for the
        default of the kind.
      seed: seed of the initial parameters and of the order of the rows.
      heldout_rows: highest number of rows of the validation split for the evaluation at
        the end; with cached states, 2 % of the texts are evaluated.
    """

    prefix = "--"

    kind: Annotated[str, choice(*REFINER_KINDS)]
    targets: Annotated[str, choice(*TARGETS)] = "model"
    steps: Count = 1000
    batch_size: Count | None = None
    learning_rate: Positive = 1e-2
    rank: Rank | None = None
    width: Size | None = None
    seed: Natural = 0
    heldout_rows: Count = 1000

    def config_for(self, model: BlockwiseConfig) -> RefinerConfig:
        """The configuration of a refiner for `model`."""
        if model.block_size < 2:
            raise UserError(
                "the model has no block heads whose drafts could be refined: train it "
                "with BlockHeadsConfig.num_heads of 2 or more."
            )
        kind = REFINER_KINDS[self.kind]
        sizes: dict[str, int] = {}
        for name in ("rank", "width"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in {field.name for field in dataclasses.fields(kind)}:
                raise UserError(f"--{name} does not apply to --kind={self.kind}.")
            sizes[name] = value
        trunk = model.trunk
        return kind(trunk.vocab_size, trunk.d_model, model.block_size, **sizes)
