"""The sweeps: grids of arguments over one command, a training or a study."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from bpd_jax.base.errors import UserError

# Sizes of a sweep: the paper's, and one that takes minutes on two CPU cores.
PAPER, TINY = "paper", "tiny"

# Words of a command, the first of them its name; or the arguments that a value adds.
Words = tuple[str, ...]
Axis = Mapping[str, Words]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A comparison of runs, as a grid for each size.

    Attributes:
      about: the comparison, in one line.
      grids: size -> the words that all points have, and for each axis the words that
        each of its values adds.
      columns: validation metrics of trainings that are shown in the table.
    """

    about: str
    grids: Mapping[str, tuple[Words, Mapping[str, Axis]]]
    columns: tuple[str, ...] = ()

    def points(self, size: str) -> dict[str, Words]:
        """The words of every point, by its name, such as `heads=3`."""
        if size not in self.grids:
            raise UserError(
                f"the sweep has no --size={size}: give {', '.join(self.grids)}."
            )
        base, axes = self.grids[size]
        points = {}
        for choice in itertools.product(*(axis.items() for axis in axes.values())):
            values = zip(axes, choice, strict=True)
            name = ",".join(f"{axis}={value}" for axis, (value, _) in values)
            points[name] = (*base, *itertools.chain(*(words for _, words in choice)))
        return points


def find_sweep(name: str) -> Sweep:
    """The sweep of a name."""
    if name not in SWEEPS:
        known = "; ".join(f"{known}: {s.about}" for known, s in SWEEPS.items())
        raise UserError(f"there is no sweep {name!r}; there are {known}.")
    return SWEEPS[name]


def _each(values: Iterable[Any], *words: str) -> Axis:
    """An axis whose values replace `{}` in words."""
    return {str(v): tuple(word.format(v) for word in words) for v in values}


def _both(about: str, axis: str, paper: Axis, tiny: Axis | None = None) -> Sweep:
    """The same axis over pretraining and over its tiny counterpart."""
    grids = {PAPER: (_PRETRAIN, {axis: paper}), TINY: (_TINY, {axis: tiny or paper})}
    return Sweep(about, grids, _ACCURACIES)


def _decays(heads: int) -> Axis:
    """λ_h = decay^(h - 1) for three decays."""
    return {
        str(decay): (
            "--gin.TrainConfig.head_weights="
            f"{tuple(round(decay**head, 4) for head in range(heads))}",
        )
        for decay in (1.0, 0.8, 0.5)
    }


def _width(width: int) -> Words:
    prefix = "--gin.TransformerConfig"
    return (f"{prefix}.d_model={width}", f"{prefix}.d_ff={4 * width}")


_PRETRAIN = ("train", "--gin_file=gin_configs/runs/pretrain.gin")
_RESCORER = ("train", "--gin_file=gin_configs/runs/pretrain_rescorer.gin")
_FINETUNE = ("train", "--gin_file=gin_configs/runs/finetune.gin")
_TINY = ("train", "--gin_file=experiments/sweeps/tiny.gin")
_ACCURACIES = tuple(f"validation_accuracy_head_{head}" for head in (1, 2, 3))
_TASKS = _each(
    ("squad", "cnn_dailymail", "samsum", "multi_news", "xsum", "newsroom"),
    "--gin_file=gin_configs/tasks/{}.gin",
)
_SIZES = _each(("32m", "61m", "94m"), "--gin_file=gin_configs/models/rescorer_{}.gin")
_MODEL = ("--gin_file=gin_configs/heads/model_targets.gin",)
_STUDIES = _each(("table4", "table10", "table11", "table12"), "{}")

SWEEPS = {
    "heads": _both(
        "separate models with 3, 6 and 9 heads (Table 10)",
        "heads",
        _each((3, 6, 9), "--gin.HEADS={}"),
    ),
    "decay": _both(
        "λ_h = decay^(h - 1), the effect of later heads on earlier ones",
        "decay",
        _decays(9),
        _decays(6),
    ),
    "head_targets": _both(
        "heads trained on the text, or on the model's own predictions",
        "targets",
        {"text": (), "model": _MODEL},
    ),
    "finetune": Sweep(
        "one finetuned model for each task (Table 1)",
        {PAPER: (_FINETUNE, {"task": _TASKS})},
        ("validation_loss", *_ACCURACIES),
    ),
    "rescorers": Sweep(
        "rescorers of three sizes (Tables 4 and 9)",
        {
            PAPER: (_RESCORER, {"size": _SIZES}),
            TINY: (
                (*_TINY, "--gin.BlockwiseConfig.heads=None"),
                {
                    "layers": _each((1, 2), "--gin.TransformerConfig.num_layers={}"),
                    "width": {str(n): _width(n) for n in (64, 128)},
                },
            ),
        },
        ("validation_loss", "validation_accuracy_head_1"),
    ),
    "studies": Sweep(
        "tables of the paper, each by a program of its own",
        {
            size: (("experiments.run", f"--size={size}"), {"study": _STUDIES})
            for size in (PAPER, TINY)
        },
    ),
}
