"""Restores a checkpoint with stacked layers into separate layers, or vice versa."""

import dataclasses

import jax
import optax
from jax.sharding import Mesh

from bpd_jax.base.typing import PyTree
from bpd_jax.models.stacking import stack_layers, unstack_layers
from bpd_jax.training.checkpoints import Checkpoints
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.state import TrainState, abstract_state


def restore_state(
    checkpoints: Checkpoints,
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    mesh: Mesh,
) -> TrainState:
    """Restores the newest checkpoint, stacked if `config.compute.scan_layers`.

    Args:
      checkpoints: checkpoints of the run.
      config: settings of the run.
      optimizer: optimizer of the run.
      abstract: shapes, dtypes and shardings of the result.
      mesh: devices.
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

    # The optimizer's state contains trees like the parameters; convert them too.
    return jax.jit(
        lambda state: jax.tree.map(convert, state, is_leaf=_has_trunk),
        out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
    )(state)


def _has_trunk(tree: PyTree) -> bool:
    return isinstance(tree, dict) and "trunk" in tree
