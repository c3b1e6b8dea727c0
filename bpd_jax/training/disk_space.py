"""Checks before a run that the disk has space for its checkpoints."""

import math
import pathlib
import shutil

import jax

from bpd_jax.base.errors import UserError
from bpd_jax.storage import files
from bpd_jax.storage.buckets import BucketPath
from bpd_jax.training.checkpoint_files import TORN
from bpd_jax.training.state import TrainState


def state_bytes(abstract: TrainState) -> int:
    """Bytes of a train state over all devices, which is the size of a checkpoint."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))


def bytes_per_device(abstract: TrainState) -> int:
    """Bytes of a train state on one device; all devices have about the same."""
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(abstract)
    )


def check_space(folder: pathlib.Path, abstract: TrainState, keep: int) -> None:
    """Raises a `UserError` unless there is space for the checkpoints.

    At most, the folder contains the newest `keep`, the best, and one being written.
    Incomplete checkpoints of a killed run count as free space, because they are removed
    before the next save.

    Args:
      folder: folder of the checkpoints, which need not exist.
      abstract: shapes and dtypes of a checkpoint.
      keep: `TrainConfig.keep_checkpoints`.
    """
    files.check_writable(folder, folder=True)
    if isinstance(folder, BucketPath):
        return  # Buckets have no size limit.
    size = state_bytes(abstract)
    existing = sum(path.name.isdigit() for path in folder.glob("*"))
    needed = size * max(keep + 2 - existing, 1)
    torn = folder.glob(f"*{TORN}*")
    left = sum(path.stat().st_size for top in torn for path in top.rglob("*"))
    free = shutil.disk_usage(folder.parent).free + left
    if needed > free:
        raise UserError(
            f"{folder} has {free / 1e9:,.1f} GB free and the run needs "
            f"{needed / 1e9:,.1f} GB: a checkpoint takes {size / 1e9:,.1f} GB, and "
            f"the folder holds up to TrainConfig.keep_checkpoints = {keep} of them, "
            "the best one and one being written; free space, lower keep_checkpoints, "
            "or choose another --workdir."
        )
