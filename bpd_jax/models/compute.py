"""Options of memory and speed of a training step, which do not change its results."""

import dataclasses
from typing import Annotated

from bpd_jax.base.settings import Count, Validated, choice, configurable

ATTENTION = ("auto", "xla", "cudnn", "pallas")
REMAT = ("none", "dots", "full")


@configurable
@dataclasses.dataclass(frozen=True)
class ComputeConfig(Validated):
    """Memory and speed of a training step.

    The options change results only by rounding, so they are not part of `model.json`,
    and a run may be resumed with other options.

    Attributes:
      attention: `xla` materializes the attention scores of a few hundred tokens of a
        row at a time; `cudnn` (NVIDIA GPUs of compute capability 8.0 or higher, in
        bfloat16) and `pallas` (TPUs; interpreted on other devices, for tests) are flash
        attention. `auto` is cudnn or pallas where they are supported, and xla
        otherwise.
      remat: the values that each transformer block keeps for its gradient: `none` keeps
        all, `dots` the results of products with its matrices, `full` only its input;
        other values are recomputed.
      loss_chunk: number of positions of a row whose logits are computed at once; None
        for all.
      scan_layers: whether to scan over the layers, with parameters stacked as
        `[layers, …]` under `trunk/layers`, which compiles faster. Checkpoints are
        converted if it changes when a run is resumed.
      accumulate: number of parts that a batch is split into and that are computed one
        after the other; their gradients are accumulated in float32.
    """

    attention: Annotated[str, choice(*ATTENTION)] = "auto"
    remat: Annotated[str, choice(*REMAT)] = "none"
    loss_chunk: Count | None = None
    scan_layers: bool = False
    accumulate: Count = 1
