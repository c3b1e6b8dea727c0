"""Checkpoints of a training of heads: one small file, replaced as a whole."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax import array_files, files
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
        arrays = array_files.read_npz(path)
        theirs, step = str(arrays.pop("key")), int(arrays.pop("step"))
        seconds = float(arrays.pop("seconds"))
        if theirs == key:
            leaves = jax.tree.leaves(state)
            specs = {
                str(number): array_files.spec_like(leaf)
                for number, leaf in enumerate(leaves)
            }
            array_files.check_arrays(arrays, specs)
    except FileNotFoundError:
        return 0, 0.0, state
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot read {path} ({error}): remove it to train from the beginning; "
            "the states are kept."
        ) from error
    if theirs != key:
        raise UserError(
            f"{path} is of a training with other settings, texts or model: remove it "
            "to train anew (the states are kept), or choose another --workdir."
        )
    leaves = [jnp.asarray(arrays[str(number)]) for number in range(len(arrays))]
    return step, seconds, jax.tree.unflatten(jax.tree.structure(state), leaves)
