"""The train state: arrays only, created in place on the devices of a mesh."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from bpd_jax.models.blockwise import init_boxed
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.partitioning import parameter_shardings, unbox
from bpd_jax.typing import Array, Int, Params, PyTree


class TrainState(NamedTuple):
    """What a step of training changes.

    Attributes:
      step: steps done, int32.
      params: of the model.
      opt_state: of the optimizer, sharded as the parameters it belongs to.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: PyTree


def abstract_state(
    model: BlockwiseConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Shape, dtype and sharding of every array of the state; nothing is allocated."""
    boxed = jax.eval_shape(
        functools.partial(_boxed_state, model, optimizer), jax.random.key(0)
    )
    return _with_shardings(boxed, mesh)


def abstract_parameters(model: BlockwiseConfig, mesh: Mesh) -> Params:
    """Shape, dtype and sharding of every parameter; nothing is allocated."""
    boxed = jax.eval_shape(functools.partial(init_boxed, model), jax.random.key(0))
    return _with_shardings(boxed, mesh)


def init_state(
    model: BlockwiseConfig,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    seed: int,
) -> TrainState:
    """The state before the first step; its values do not depend on the mesh."""

    def init(key: Array) -> TrainState:
        return unbox(_boxed_state(model, optimizer, key))

    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(init, out_shardings=shardings)(jax.random.key(seed))


def with_trunk(state: TrainState, trunk: Params) -> TrainState:
    """The state with another trunk, before the first step.

    Args:
      state: of `init_state`.
      trunk: parameters of a trunk of the same sizes; they are copied.
    """

    def put(old: Array, new: Array) -> Array:
        # A copy, because a step of training consumes its state.
        return jax.device_put(jnp.array(new, old.dtype), old.sharding)

    placed = jax.tree.map(put, state.params["trunk"], trunk)
    return state._replace(params={**state.params, "trunk": placed})


def _boxed_state(
    model: BlockwiseConfig, optimizer: optax.GradientTransformation, key: Array
) -> TrainState:
    # The boxes carry the axis names from the parameters into the optimizer's state.
    params = init_boxed(model, key)
    return TrainState(jnp.int32(0), params, optimizer.init(params))


def _with_shardings(boxed: PyTree, mesh: Mesh) -> PyTree:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        unbox(boxed),
        parameter_shardings(boxed, mesh),
    )
