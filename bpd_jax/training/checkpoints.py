"""Checkpoints: parameters, optimizer and position in the data, saved with Orbax.

A run folder contains them as `checkpoints/STEP/{params,optimizer,data}`. Parameters are
a separate item, so that decoding reads nothing else. A checkpoint is written under
another name and renamed when it is complete, so a folder named STEP is never
incomplete. Under gs:// a folder STEP is complete if it contains `commit_success.txt`,
which is written last. The next run removes an incomplete checkpoint of a killed run.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from orbax.checkpoint import checkpoint_managers, multihost

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params, PyTree
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.layers import stack_layers, unstack_layers
from bpd_jax.models.parameters import abstract_parameters
from bpd_jax.models.transformer_config import ComputeConfig
from bpd_jax.storage.paths import as_path, in_bucket
from bpd_jax.training.checkpoint_files import (
    TORN,
    layers_are_stacked,
    open_folder,
    read_item,
    reason,
    write_digests,
)
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.hosts import agree
from bpd_jax.training.run_names import whole_steps
from bpd_jax.training.state import TrainState, abstract_state

BEST = "best_step"


class _NewestAndBest:
    """An Orbax preservation policy: the newest checkpoints and the best one."""

    def __init__(self, newest: int) -> None:
        self.newest = newest
        self.best: int | None = None

    def should_preserve(
        self,
        checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        del context
        kept = {info.step for info in checkpoints[-self.newest :]} | {self.best}
        return [info.step in kept for info in checkpoints]


class Checkpoints:
    """The checkpoints of a run, saved asynchronously and read back.

    Attributes:
      latest_step: step of the newest one, which may still be being written; or None.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 1) -> None:
        """Opens or creates `folder`, which keeps the newest `keep` and the best."""
        self._folder = as_path(folder).absolute()
        self._policy = _NewestAndBest(keep)
        with self._saving():
            self._manager = open_folder(
                self._folder,
                preservation_policy=self._policy,
                cleanup_tmp_directories=True,
                async_options=ocp.AsyncOptions(
                    barrier_sync_fn=_barrier, post_finalization_callback=self._seal
                ),
            )
        self._step = 0  # step of the newest save
        # Processes may see different states of a shared folder.
        self.latest_step = agree(self._manager.latest_step())
        if self.latest_step != self._manager.latest_step():
            self._manager.reload()

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints; waits for a save in progress."""
        self.wait()
        return agree(sorted(self._manager.all_steps()))

    def save(
        self,
        step: int,
        state: TrainState,
        data: dict[str, Any],
        best: int | None = None,
    ) -> None:
        """Starts an asynchronous save; returns when the arrays have been copied.

        Args:
          data: what else the run needs to resume, as JSON.
          best: step of the best checkpoint, which is kept; it may be this one.
        """
        if step == self.latest_step:
            return
        rest = {"step": state.step, "opt_state": state.opt_state}
        with self._saving():
            # `_seal` and the policy refer to the previous save until it has finished.
            self._manager.wait_until_finished()
            self._policy.best, self._step = best, step
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.PyTreeSave(state.params),
                    optimizer=ocp.args.PyTreeSave(rest),
                    data=ocp.args.JsonSave({**data, BEST: best}),
                ),
            )
        self.latest_step = step

    def _seal(self) -> None:
        """Adds digests to the checkpoint when all of its files are written."""
        # Orbax's primary process renames the folder next. It is not always process 0.
        if jax.process_index():
            return
        if in_bucket(self._folder):
            write_digests(self._folder / str(self._step))
            return
        for path in self._folder.glob(f"{self._step}.*{TORN}*"):
            write_digests(path)

    def wait(self) -> None:
        """Waits for a save in progress; raises like `save`."""
        with self._saving():
            self._manager.wait_until_finished()

    def restore(self, abstract: TrainState) -> TrainState:
        """Restores the newest checkpoint with the shardings of `abstract`."""
        rest = {"step": abstract.step, "opt_state": abstract.opt_state}
        params = self._read("params", abstract.params)
        return TrainState(params=params, **self._read("optimizer", rest))

    def is_stacked(self) -> bool:
        """Whether the layers of the newest checkpoint are stacked."""
        assert self.latest_step is not None
        return layers_are_stacked(self._manager, self._folder, self.latest_step)

    def restore_data(self) -> dict[str, Any]:
        """Reads the argument `data` of `save` from the newest checkpoint."""
        return self._read("data")

    def _read(self, item: str, abstract: PyTree | None = None) -> Any:
        step = self.latest_step
        assert step is not None
        return read_item(self._manager, self._folder, step, item, abstract)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Closing waits for a save in progress. Its error must not hide an earlier one.
        quiet = contextlib.suppress(UserError) if kind else contextlib.nullcontext()
        with quiet, self._saving():
            self._manager.close()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Turns errors of writing, such as a full disk, into a `UserError`."""
        try:
            yield
        # Orbax and tensorstore raise either of them for errors of the system.
        except (OSError, ValueError) as error:
            steps = whole_steps(self._folder)
            newest = (
                f"the newest complete checkpoint is that of step {max(steps):,}"
                if steps
                else "there is no complete checkpoint yet"
            )
            raise UserError(
                f"cannot write a checkpoint to {self._folder}: {reason(error)}; "
                f"{newest}: free space or choose another --workdir, and run the same "
                "command again."
            ) from error


def _barrier(*, key: str, timeout_ms: int) -> None:
    """Orbax's barrier, which a process skips if its save has failed.

    Orbax synchronizes all processes even while an error is raised in one of them. The
    others wait for that process elsewhere, so all would wait for 20 minutes.
    """
    if sys.exc_info()[1] is None:
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def best_step(folder: str | os.PathLike[str]) -> int | None:
    """The step of the best checkpoint of a run, as its newest one says; or None."""
    folder = as_path(folder).absolute()
    steps = whole_steps(folder)
    if not steps:
        return None
    with contextlib.closing(open_folder(folder, create=False)) as manager:
        best = read_item(manager, folder, max(steps), "data").get(BEST)
    return best if best in steps else None


def load_parameters(
    folder: str | os.PathLike[str],
    model: BlockwiseConfig,
    step: int | None = None,
    mesh: Mesh | None = None,
) -> Params:
    """Reads the parameters of one checkpoint, each device its own shards.

    Layers that were saved stacked (`ComputeConfig.scan_layers`) are unstacked. `folder`
    is `checkpoints` of a run; without a step it is the newest, without a mesh on the
    first device.
    """
    folder = as_path(folder).absolute()
    steps: list[int] = []
    if folder.is_dir():
        with contextlib.closing(open_folder(folder, create=False)) as manager:
            steps = list(manager.all_steps())
            if steps and (step is None or step in steps):
                step = step or max(steps)
                stacked = layers_are_stacked(manager, folder, step)
                compute = ComputeConfig(scan_layers=stacked)
                abstract = abstract_parameters(model, mesh, compute)
                params = read_item(manager, folder, step, "params", abstract)
                if stacked:
                    params["trunk"] = jax.jit(unstack_layers)(params["trunk"])
                return params
    missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    existing = f", only {', '.join(map(str, sorted(steps)))}" if steps else ""
    raise UserError(
        f"{folder} holds {missing}{existing}: name a run that has saved one."
    )


def restore_state(
    checkpoints: Checkpoints,
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    mesh: Mesh,
) -> TrainState:
    """Restores the newest checkpoint, stacked if `config.compute.scan_layers`."""
    stacked = checkpoints.is_stacked()
    if stacked == config.compute.scan_layers:
        return checkpoints.restore(abstract)
    saved = dataclasses.replace(config.compute, scan_layers=stacked)
    state = checkpoints.restore(abstract_state(config.model, optimizer, mesh, saved))
    layers = config.model.trunk.num_layers

    def convert(tree: PyTree) -> PyTree:
        if not _has_trunk(tree):
            return tree
        trunk = tree["trunk"]
        trunk = unstack_layers(trunk) if stacked else stack_layers(trunk, layers)
        return {**tree, "trunk": trunk}

    # The optimizer's state contains trees like the parameters; convert them too.
    return jax.jit(
        lambda state: jax.tree.map(convert, state, is_leaf=_has_trunk),
        out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    )(state)


def _has_trunk(tree: PyTree) -> bool:
    return isinstance(tree, dict) and "trunk" in tree
