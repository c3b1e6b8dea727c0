"""Checkpoints of a training of heads: one small file, replaced as a whole."""

import pathlib
import zipfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax import files
from bpd_jax.errors import UserError
from bpd_jax.typing import PyTree


def save_checkpoint(
    path: pathlib.Path, key: str, step: int, seconds: float, state: PyTree
) -> None:
    """Writes the state after some steps of the training that `key` names.

    Args:
      path: of the file; an older one is replaced.
      key: equal for runs that may go on with it.
      step: steps that were done.
      seconds: that they took, in all runs together.
      state: a pytree of arrays.
    """
    leaves = jax.device_get(jax.tree.leaves(state))
    arrays = {str(number): leaf for number, leaf in enumerate(leaves)}
    with files.replacing_file(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, key=np.str_(key), step=step, seconds=seconds, **arrays)


def load_checkpoint(
    path: pathlib.Path, key: str, state: PyTree
) -> tuple[int, float, PyTree]:
    """Reads the newest checkpoint; without one the state is as it is, after 0 steps.

    Returns:
      Steps, seconds and state, as they were saved.

    Raises:
      UserError: the file is damaged, or of another training.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            theirs, step = str(archive["key"]), int(archive["step"])
            seconds = float(archive["seconds"])
            arrays = [archive[str(n)] for n in range(len(archive.files) - 3)]
    except FileNotFoundError:
        return 0, 0.0, state
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise UserError(
            f"cannot read {path} ({error}): remove it to train from the beginning; "
            "the states are kept."
        ) from error
    if theirs != key:
        raise UserError(
            f"{path} is of a training with other settings, texts or model: remove it "
            "to train anew (the states are kept), or choose another --workdir."
        )
    leaves = [jnp.asarray(array) for array in arrays]
    return step, seconds, jax.tree.unflatten(jax.tree.structure(state), leaves)
