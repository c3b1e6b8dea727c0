"""Checkpoints: parameters, optimizer and place in the data, saved together by Orbax.

A run folder holds them as `checkpoints/STEP/{params,optimizer,data}`. Parameters lie
apart from the rest, so that decoding reads nothing else.
"""

import contextlib
import functools
import os
import pathlib
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, SingleDeviceSharding

from bpd_jax.errors import UserError
from bpd_jax.models.blockwise import parameter_shapes
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.training.state import TrainState, abstract_parameters
from bpd_jax.typing import Params, PyTree

FOLDER = "checkpoints"


class Checkpoints:
    """The checkpoints of a run, saved asynchronously and read back."""

    def __init__(self, folder: str | os.PathLike[str], keep: int = 1) -> None:
        """Opens or makes `folder`; the newest `keep` checkpoints stay in it."""
        self._folder = pathlib.Path(folder).absolute()
        self._manager = _open(self._folder, max_to_keep=keep)

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, also of one that is still being written."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, data: dict[str, Any]) -> None:
        """Starts to save; the arrays are copied off before it returns.

        Args:
          step: of the state.
          state: of the run.
          data: of the iterator over the rows, as `RowIterator.state` gives it.
        """
        if step == self.latest_step:
            return
        rest = {"step": state.step, "opt_state": state.opt_state}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                optimizer=ocp.args.StandardSave(rest),
                data=ocp.args.JsonSave(data),
            ),
        )

    def restore(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Reads the newest checkpoint onto the devices that `abstract` names.

        Returns:
          The state and what `save` was given as `data`.

        Raises:
          UserError: it is of another model or optimizer, or broken.
        """
        step = self.latest_step
        assert step is not None
        rest = {"step": abstract.step, "opt_state": abstract.opt_state}
        read = functools.partial(_restore, self._manager, self._folder, step)
        params = read("params", abstract.params)
        return TrainState(params=params, **read("optimizer", rest)), read("data")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Waits for a save that is under way.
        self._manager.close()


def load_parameters(
    folder: str | os.PathLike[str],
    model: BlockwiseConfig,
    step: int | None = None,
    mesh: Mesh | None = None,
) -> Params:
    """Reads the parameters of one checkpoint, and nothing else of it.

    Args:
      folder: the folder `checkpoints` of a run.
      model: sizes; see `load_config`.
      step: which checkpoint; None for the newest.
      mesh: devices to put the parameters on; None for the first device alone.

    Raises:
      UserError: there is no such checkpoint, or it is broken or of another model.
    """
    folder = pathlib.Path(folder).absolute()
    if mesh is None:
        device = SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
            parameter_shapes(model),
        )
    else:
        abstract = abstract_parameters(model, mesh)
    steps: list[int] = []
    if folder.is_dir():
        with contextlib.closing(_open(folder, create=False)) as manager:
            steps = list(manager.all_steps())
            if steps and (step is None or step in steps):
                return _restore(manager, folder, step or max(steps), "params", abstract)
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    there = f", only {', '.join(map(str, sorted(steps)))}" if steps else ""
    raise UserError(f"{folder} holds {wanted}{there}: name a run that has saved one.")


def _open(folder: pathlib.Path, **options: Any) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        folder,
        options=ocp.CheckpointManagerOptions(**options),
        # Named here, so that metadata can be read before anything is saved.
        item_handlers={
            "params": ocp.StandardCheckpointHandler(),
            "optimizer": ocp.StandardCheckpointHandler(),
            "data": ocp.JsonCheckpointHandler(),
        },
    )


def _restore(
    manager: ocp.CheckpointManager,
    folder: pathlib.Path,
    step: int,
    item: str,
    abstract: PyTree | None = None,
) -> Any:
    """Reads one item of a checkpoint, after a look at the shapes it holds."""
    place = folder / str(step) / item
    try:
        if abstract is None:
            how = ocp.args.JsonRestore()
        else:
            saved = manager.item_metadata(step)[item]
            if saved is None:
                raise ValueError("its description is missing or broken")
            _check_shapes(place, saved.tree, abstract)
            how = ocp.args.StandardRestore(abstract)
        return manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]
    # What Orbax and tensorstore raise for files that are missing or torn.
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise UserError(
            f"cannot read the checkpoint {place}: {reason}; remove the folder "
            f"{place.parent} to go back to the checkpoint before it."
        ) from error


def _check_shapes(folder: pathlib.Path, saved: PyTree, abstract: PyTree) -> None:
    def shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {
            "/".join(_key(entry) for entry in path): tuple(leaf.shape)
            for path, leaf in leaves
        }

    theirs, mine = shapes(saved), shapes(abstract)
    for name in sorted(theirs.keys() | mine.keys()):
        if theirs.get(name) != mine.get(name):
            raise UserError(
                f"the checkpoint {folder} does not fit: {name} is "
                f"{theirs.get(name, 'missing')} there and {mine.get(name, 'missing')} "
                "in this configuration; use the configuration of that run."
            )


def _key(entry: Any) -> str:
    """The name of a path entry, the same for a named tuple and the dict saved of it."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    raise TypeError(f"unknown path entry {entry!r}")
