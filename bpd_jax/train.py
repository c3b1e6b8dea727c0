"""Trains a blockwise language model; the same command again goes on where it stopped.

    python -m bpd_jax.train --gin_file=experiments/demo/demo.gin --workdir=runs/demo
    python -m bpd_jax.train --gin_file=experiments/demo/demo.gin --workdir=runs/demo \\
        --gin.STEPS=50 --dry_run

With a gin file of a HeadsTrainConfig it trains block heads on a model that has been
trained already, from texts that the model wrote, and leaves the model as it is:

    python -m bpd_jax.train --gin_file=gin_configs/runs/heads.gin \\
        --workdir=runs/heads --gin.MODEL="'runs/base'" --gin.DATA="'runs/texts'"

With TrainConfig.start the trunk is that of a trained model, and trunk and heads are
trained together, with a rate each (gin_configs/runs/joint.gin).
"""

import dataclasses
from typing import Any

from absl import flags

from bpd_jax import cli, configuration
from bpd_jax.configuration import Parsed
from bpd_jax.decoding.loading import load_model
from bpd_jax.errors import UserError
from bpd_jax.models.partitioning import make_mesh
from bpd_jax.training import plan, trainer
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.heads import train as heads
from bpd_jax.training.heads.settings import HeadsTrainConfig
from bpd_jax.typing import Params

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the configuration and all shapes, and write nothing."
)


def main() -> None:
    """Does what the flags say."""
    parsed: Parsed[Any] = configuration.parse_flags(TrainConfig, HeadsTrainConfig)
    if isinstance(parsed.value, HeadsTrainConfig):
        _train_heads(parsed)
        return
    config = parsed.value
    if _DRY_RUN.value:
        mesh = make_mesh(config.mesh)
        trainer.check_batch(config, mesh)
        print(parsed.describe(), config, plan.describe_model(config.model), sep="\n\n")
        print(plan.describe_shapes(config, mesh))
        return
    trunk = None if config.start is None else _trunk(config, config.start)
    trainer.train(config, cli.required("workdir"), parsed.text, parsed.operative, trunk)


def _trunk(config: TrainConfig, start: str) -> Params:
    """The trunk that a run begins with.

    Raises:
      UserError: it has other sizes than the run's model.
    """
    loaded = load_model(start)
    theirs = dataclasses.asdict(loaded.functions.config.trunk)
    for name, mine in dataclasses.asdict(config.model.trunk).items():
        if name not in ("dtype", "param_dtype") and mine != theirs[name]:
            raise UserError(
                f"TransformerConfig.{name} is {mine!r} and {theirs[name]!r} in "
                f"{start}: give the sizes of the model that the run starts from."
            )
    return loaded.params["trunk"]


def _train_heads(parsed: Parsed[HeadsTrainConfig]) -> None:
    config = parsed.value
    loaded = load_model(config.model)
    model, params = loaded.functions.config, loaded.params
    if _DRY_RUN.value:
        print(parsed.describe(), config, sep="\n\n", end="\n\n")
        print(heads.describe(config, model, heads.make_plan(config, model, params)))
        return
    workdir = cli.required("workdir")
    heads.train_heads(config, model, params, workdir, parsed.text, parsed.operative)


if __name__ == "__main__":
    cli.run(main)
