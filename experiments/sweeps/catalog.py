"""The sweeps: grids of gin files and settings over one run."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from bpd_jax.base.errors import UserError

# Sizes of a sweep: the paper's, and one that takes minutes on two CPU cores.
PAPER, TINY = "paper", "tiny"

# Command-line arguments of a point, or of one value of an axis.
Arguments = tuple[str, ...]
Axis = Mapping[str, Arguments]


@dataclasses.dataclass(frozen=True)
class Grid:
    """A run, and the axes along which it varies.

    Attributes:
      base: the arguments that all points have.
      axes: name of an axis -> name of a value -> the arguments that it adds.
    """

    base: Arguments
    axes: Mapping[str, Axis]

    def points(self) -> dict[str, Arguments]:
        """The arguments of every point, by its name, such as `heads=3`."""
        points = {}
        for choice in itertools.product(*(axis.items() for axis in self.axes.values())):
            name = ",".join(
                f"{axis}={value}"
                for axis, (value, _) in zip(self.axes, choice, strict=True)
            )
            added = itertools.chain(*(arguments for _, arguments in choice))
            points[name] = (*self.base, *added)
        return points


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A comparison of runs, as a grid for each size.

    Attributes:
      about: the comparison, in one line.
      grids: by size.
      columns: validation metrics shown in the table.
    """

    about: str
    grids: Mapping[str, Grid]
    columns: tuple[str, ...]


def find_sweep(name: str) -> Sweep:
    """The sweep of a name.

    Raises:
      UserError: there is none.
    """
    if name not in SWEEPS:
        known = "; ".join(f"{known}: {s.about}" for known, s in SWEEPS.items())
        raise UserError(f"there is no sweep {name!r}; there are {known}.")
    return SWEEPS[name]


def find_points(name: str, size: str) -> dict[str, Arguments]:
    """The points of a sweep in one of its sizes.

    Raises:
      UserError: there is no such sweep, or it does not have that size.
    """
    grids = find_sweep(name).grids
    if size not in grids:
        raise UserError(
            f"the sweep {name} has no --size={size}: give {', '.join(grids)}."
        )
    return grids[size].points()


def _each(values: Iterable[Any], *arguments: str) -> Axis:
    """An axis whose values replace `{}` in arguments."""
    return {str(v): tuple(word.format(v) for word in arguments) for v in values}


def _both(axis: str, paper: Axis, tiny: Axis | None = None) -> dict[str, Grid]:
    """The same axis over pretraining and over its tiny counterpart."""
    return {
        PAPER: Grid(("--gin_file=gin_configs/runs/pretrain.gin",), {axis: paper}),
        TINY: Grid((_TINY,), {axis: paper if tiny is None else tiny}),
    }


def _orders(add_every: int) -> Axis:
    """Orders in which heads are added.

    The last of the paper's eight is added after a fifth of its run, the last of the
    tiny model's five after a quarter.
    """
    files = "--gin_file=gin_configs/heads/{}.gin"
    orders = _each(("in_order", "by_entropy"), files, f"--gin.ADD_EVERY={add_every}")
    return {"at_once": (), **orders}


_TINY = "--gin_file=experiments/sweeps/tiny.gin"
_ACCURACIES = tuple(f"validation_accuracy_head_{head}" for head in (1, 2, 3))
_TASKS = ("squad", "cnn_dailymail", "samsum", "multi_news", "xsum", "newsroom")
_DECAY = ("--gin_file=gin_configs/heads/decay.gin", "--gin.DECAY={}")
_MODEL = ("--gin_file=gin_configs/heads/model_targets.gin",)

SWEEPS = {
    "heads": Sweep(
        "separate models with 3, 6 and 9 heads (Table 10)",
        _both("heads", _each((3, 6, 9), "--gin.HEADS={}")),
        _ACCURACIES,
    ),
    "decay": Sweep(
        "λ_h = decay^(h - 1), the effect of later heads on earlier ones",
        _both("decay", _each((1.0, 0.8, 0.5), *_DECAY)),
        _ACCURACIES,
    ),
    "schedule": Sweep(
        "all heads at once, in order, by ascending entropy",
        _both("order", _orders(5000), _orders(20)),
        _ACCURACIES,
    ),
    "head_targets": Sweep(
        "heads trained on the text, or on the model's own predictions",
        _both("targets", {"text": (), "model": _MODEL}),
        _ACCURACIES,
    ),
    "finetune": Sweep(
        "one finetuned model for each task (Table 1)",
        {
            PAPER: Grid(
                ("--gin_file=gin_configs/runs/finetune.gin",),
                {"task": _each(_TASKS, "--gin_file=gin_configs/tasks/{}.gin")},
            )
        },
        ("validation_loss", *_ACCURACIES),
    ),
    "rescorers": Sweep(
        "rescorers of three sizes (Tables 4 and 9)",
        {
            PAPER: Grid(
                ("--gin_file=gin_configs/runs/pretrain_rescorer.gin",),
                {
                    "size": _each(
                        ("32m", "61m", "94m"),
                        "--gin_file=gin_configs/models/rescorer_{}.gin",
                    )
                },
            ),
            TINY: Grid(
                (_TINY, "--gin.BlockwiseConfig.heads=None"),
                {
                    "layers": _each((1, 2), "--gin.TransformerConfig.num_layers={}"),
                    "width": {
                        str(n): (
                            f"--gin.TransformerConfig.d_model={n}",
                            f"--gin.TransformerConfig.d_ff={4 * n}",
                        )
                        for n in (64, 128)
                    },
                },
            ),
        },
        ("validation_loss", "validation_accuracy_head_1"),
    ),
}
