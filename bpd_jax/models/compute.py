"""How a training step computes, apart from what it computes."""

import dataclasses

from bpd_jax.errors import UserError

ATTENTION = ("auto", "xla", "cudnn", "pallas")
REMAT = ("none", "dots", "full")


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
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

    attention: str = "auto"
    remat: str = "none"
    loss_chunk: int | None = None
    scan_layers: bool = False
    accumulate: int = 1

    def __post_init__(self) -> None:
        for name, choices in (("attention", ATTENTION), ("remat", REMAT)):
            if getattr(self, name) not in choices:
                raise UserError(
                    f"ComputeConfig.{name} must be one of {', '.join(choices)}, not "
                    f"{getattr(self, name)!r}."
                )
        for name in ("loss_chunk", "accumulate"):
            value = getattr(self, name)
            if name == "loss_chunk" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(
                    f"ComputeConfig.{name} must be a positive integer, not {value!r}."
                )
        if not isinstance(self.scan_layers, bool):
            raise UserError(
                f"ComputeConfig.scan_layers must be True or False, not "
                f"{self.scan_layers!r}."
            )
