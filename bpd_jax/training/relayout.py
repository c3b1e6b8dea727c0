"""Restoring a run whose layers were saved one by one into a scan of them, or back."""

import dataclasses

import jax
import optax
from jax.sharding import Mesh

from bpd_jax.models.stacking import stack_layers, unstack_layers
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.state import TrainState, abstract_state
from bpd_jax.typing import PyTree


def restore_state(
    checkpoints: Checkpoints,
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    mesh: Mesh,
) -> TrainState:
    """Reads the newest checkpoint, with its layers as `config.compute` has them.

    Args:
      checkpoints: of the run.
      config: the run.
      optimizer: of the run.
      abstract: the state as it is to be.
      mesh: to put it on.

    Raises:
      UserError: the checkpoint is of another model or optimizer, or broken.
    """
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

    # The optimizer keeps trees of the parameters' form: all of them are converted.
    return jax.jit(
        lambda state: jax.tree.map(convert, state, is_leaf=_has_trunk),
        out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    )(state)


def _has_trunk(tree: PyTree) -> bool:
    return isinstance(tree, dict) and "trunk" in tree
