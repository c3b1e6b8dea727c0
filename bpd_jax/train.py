"""Trains a blockwise language model; the same command again goes on where it stopped.

    python -m bpd_jax.train --gin_file=experiments/demo/demo.gin --workdir=runs/demo
    python -m bpd_jax.train --gin_file=experiments/demo/demo.gin --workdir=runs/demo \\
        --gin.STEPS=50 --dry_run
"""

from absl import flags

from bpd_jax import cli, configuration
from bpd_jax.models.partitioning import make_mesh
from bpd_jax.training import plan, trainer
from bpd_jax.training.config import TrainConfig

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the configuration and all shapes, and write nothing."
)


def main() -> None:
    """Does what the flags say."""
    parsed = configuration.parse_flags(TrainConfig)
    config = parsed.value
    if _DRY_RUN.value:
        mesh = make_mesh(config.mesh)
        trainer.check_batch(config, mesh)
        print(parsed.describe(), config, plan.describe_model(config.model), sep="\n\n")
        print(plan.describe_shapes(config, mesh))
        return
    trainer.train(config, cli.required("workdir"), parsed.text, parsed.operative)


if __name__ == "__main__":
    cli.run(main)
