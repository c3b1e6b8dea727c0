"""Validates a launch before requesting resources."""

import pathlib
import subprocess
from collections.abc import Collection, Sequence

from bpd_jax import configuration
from bpd_jax.base.errors import UserError
from bpd_jax.training.config import TrainConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]


def check_run(
    gin_files: Sequence[str],
    bindings: Sequence[str],
    devices: Collection[int],
    slices: int = 1,
) -> configuration.Parsed[TrainConfig]:
    """Parses a run's configuration and checks its mesh and batch size.

    Args:
      gin_files: in order.
      bindings: statements such as `STEPS = 10`.
      devices: every number of devices that jax may see.
      slices: number of TPU slices over which the devices are divided equally.

    Raises:
      UserError: a file or setting is wrong, or the mesh or the batch does not fit.
    """
    if not gin_files:
        raise UserError(
            "--gin_file is missing: give a configuration file, such as "
            "--gin_file=gin_configs/runs/pretrain.gin."
        )
    parsed = configuration.parse(gin_files, bindings, TrainConfig)
    config, parts = parsed.value, parsed.value.compute.accumulate
    for count in devices:
        data, fsdp, _ = config.mesh.shape(count, slices)
        if config.batch_size % (data * fsdp * parts):
            raise UserError(
                f"TrainConfig.batch_size = {config.batch_size} is not a multiple of "
                f"data × fsdp × accumulate = {data} × {fsdp} × {parts}: change "
                "MeshConfig or ComputeConfig.accumulate."
            )
    return parsed


def check_travels(gin_files: Sequence[str]) -> None:
    """Checks that a checkout of HEAD on another machine contains the gin files.

    Args:
      gin_files: all that the run reads, including those included by others.

    Raises:
      UserError: a file is not committed under that name, or there are uncommitted
        changes.
    """
    for file in gin_files:
        if pathlib.Path(file).is_absolute() or _git("ls-files", "--", file) != file:
            raise UserError(
                f"the gin file {file} is not a file of this repository: the workers "
                "get the committed files, so commit it and give its path relative to "
                "the repository."
            )
    changed = _git("status", "--porcelain", "--untracked-files=no")
    if changed:
        raise UserError(
            f"{changed.split()[1]} has uncommitted changes: the workers get the "
            "committed files, so commit first."
        )


def git_folder() -> str:
    """The git directory of this checkout.

    Raises:
      UserError: this is not a checkout.
    """
    return _git("rev-parse", "--absolute-git-dir")


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"git cannot read {ROOT}: launch from a checkout.") from error
