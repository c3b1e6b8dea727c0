"""How a training step computes, apart from what it computes."""

import dataclasses
from typing import Annotated

from bpd_jax.settings import Count, Validated, choice

ATTENTION = ("auto", "xla", "cudnn", "pallas")
REMAT = ("none", "dots", "full")


@dataclasses.dataclass(frozen=True)
class ComputeConfig(Validated):
    """Memory and speed of a training step.

    Results are equal up to rounding whatever is chosen here, so that none of it is
    part of `model.json` or of what makes two runs the same.

    Attributes:
      attention: `xla` holds the scores of a layer; `cudnn` (NVIDIA GPUs of compute
        capability 8.0 or higher, in bfloat16) and `pallas` (TPUs; interpreted
        elsewhere, which is for tests) are flash attention, which does not. `auto` is
        cudnn or pallas where they run, and xla elsewhere, as on older GPUs.
      remat: what each transformer block keeps for its gradient: `none` keeps all,
        `dots` the results of products with its matrices, `full` its input alone; the
        rest is computed again.
      loss_chunk: positions of a row whose logits exist at once; None for all.
      scan_layers: whether one compiled block runs `num_layers` times, over parameters
        stacked `[layers, …]` under `trunk/layers`: compiled much sooner. It may
        change when a run goes on: what was saved in the other form is converted.
      accumulate: parts that a batch is split into, one computed after the other;
        their gradients add up in float32 to those of the whole batch.
    """

    attention: Annotated[str, choice(*ATTENTION)] = "auto"
    remat: Annotated[str, choice(*REMAT)] = "none"
    loss_chunk: Count | None = None
    scan_layers: bool = False
    accumulate: Count = 1
