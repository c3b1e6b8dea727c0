"""What can be wrong with a launch, found before anything is paid for."""

import pathlib
import subprocess
from collections.abc import Collection, Sequence

from bpd_jax import configuration
from bpd_jax.errors import UserError
from bpd_jax.training.config import TrainConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]


def check_run(
    gin_files: Sequence[str],
    bindings: Sequence[str],
    devices: Collection[int],
    slices: int = 1,
) -> configuration.Parsed[TrainConfig]:
    """Builds the run's configuration, and shares its batch out over the devices.

    Args:
      gin_files: in order.
      bindings: statements such as `STEPS = 10`.
      devices: every number of devices that jax may see.
      slices: TPU slices that hold them, in equal parts.

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
    """Checks that the files are there on other machines too, in their checkout.

    Args:
      gin_files: all that the run reads, included ones too.

    Raises:
      UserError: one is not committed under that name, or has uncommitted changes.
    """
    for file in gin_files:
        if pathlib.Path(file).is_absolute() or _git("ls-files", "--", file) != file:
            raise UserError(
                f"the gin file {file} is not a file of this repository: the workers "
                "get what is committed here, so commit it and name it from the top."
            )
    changed = _git("status", "--porcelain", "--untracked-files=no")
    if changed:
        raise UserError(
            f"{changed.split()[1]} has changes that are not committed: the workers get "
            "what is committed, so commit first."
        )


def git_folder() -> str:
    """The folder in which git keeps this checkout's own files.

    Raises:
      UserError: this is no checkout.
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
