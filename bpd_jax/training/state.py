"""The optimizer, and the train state: arrays only, created in place on a mesh."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Int, Params, PyTree
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.layers import is_stacked, stack_layers
from bpd_jax.models.parameters import init_boxed
from bpd_jax.models.partitioning import unbox, with_shardings
from bpd_jax.models.transformer_config import ComputeConfig
from bpd_jax.training.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate by step, counted from 0, for a run of `steps` steps."""
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup_steps = config.warmup_steps
    if warmup_steps < 1:
        warmup_steps *= steps
    warmup_steps = round(warmup_steps)
    decay_steps = max(steps - warmup_steps, 1)
    decay = {
        "cosine": optax.cosine_decay_schedule(
            peak, decay_steps, alpha=config.final_fraction
        ),
        "linear": optax.linear_schedule(peak, final, decay_steps),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    if not warmup_steps:
        return decay
    # The warmup begins above 0, because a step with a rate of 0 would be wasted.
    warmup = optax.linear_schedule(peak / warmup_steps, peak, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, decay], [warmup_steps])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Builds the optimizer for a run of `steps` steps."""
    parts = [
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decays,
        )
    ]
    if config.clip_norm is not None:
        parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
    if config.trunk_learning_rate is not None:
        # The whole update of AdamW is proportional to the learning rate.
        share = config.trunk_learning_rate / config.learning_rate

        def slow_trunk(updates: PyTree, params: PyTree) -> PyTree:
            del params
            trunk = jax.tree.map(lambda x: share * x, updates["trunk"])
            return {**updates, "trunk": trunk}

        parts.append(optax.stateless(slow_trunk))
    return parts[0] if len(parts) == 1 else optax.chain(*parts)


def decays(params: PyTree) -> PyTree:
    """A mask of the parameters with weight decay: all but biases and norm scales.

    They are recognised by name, because a stacked bias has two axes like a kernel.
    """

    def is_weight(path: tuple, _: object) -> bool:
        names = [
            entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)
        ]
        return not names[-1].startswith(("bias", "scale"))

    return jax.tree_util.tree_map_with_path(is_weight, params)


_DEFAULT = ComputeConfig()


class TrainState(NamedTuple):
    """The state of training.

    Attributes:
      step: number of completed steps, int32.
      params: parameters of the model in its `param_dtype` (float32 by default), which
        is independent of the dtype of its computations; stacked if
        `ComputeConfig.scan_layers`.
      opt_state: state of the optimizer, with the shardings and dtypes of the
        parameters.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: PyTree


def abstract_state(
    model: BlockwiseConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    compute: ComputeConfig = _DEFAULT,
) -> TrainState:
    """Shape, dtype and sharding of every array of the state; nothing is allocated."""
    make = functools.partial(_boxed_state, model, optimizer, compute=compute)
    return with_shardings(jax.eval_shape(make, jax.random.key(0)), mesh)


def init_state(
    model: BlockwiseConfig,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    seed: int,
    compute: ComputeConfig = _DEFAULT,
) -> TrainState:
    """The train state before the first step.

    Its values depend neither on the mesh nor on `compute`.
    """

    def init(key: Array) -> TrainState:
        return unbox(_boxed_state(model, optimizer, key, compute))

    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(init, out_shardings=shardings)(jax.random.key(seed))


def with_parameters(state: TrainState, replacements: Params) -> TrainState:
    """Replaces parameters of an initial state.

    `replacements` are `trunk` (not stacked), `heads`, or both, of the same sizes, on
    the mesh of the state or on the host; they are copied.
    """
    current = {part: state.params[part] for part in replacements}
    dtypes, shardings = (
        jax.tree.map(lambda x, name=name: getattr(x, name), current)
        for name in ("dtype", "sharding")
    )

    # From shard to shard: no device holds the whole of a parameter that is sharded.
    @functools.partial(jax.jit, out_shardings=shardings)
    def placed(new: Params) -> Params:
        if is_stacked(current.get("trunk", {})):
            layers = jax.tree.leaves(current["trunk"]["layers"])
            new = {**new, "trunk": stack_layers(new["trunk"], len(layers[0]))}
        # A copy, because a training step donates its state.
        return jax.tree.map(lambda x, to: jnp.array(x, to, copy=True), new, dtypes)

    return state._replace(params={**state.params, **placed(dict(replacements))})


def state_bytes(abstract: TrainState) -> int:
    """Bytes of a train state over all devices, which is the size of a checkpoint."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))


def bytes_per_device(abstract: PyTree) -> int:
    """Bytes of arrays or a train state on one device; all have about the same."""
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(abstract)
    )


def _boxed_state(
    model: BlockwiseConfig,
    optimizer: optax.GradientTransformation,
    key: Array,
    compute: ComputeConfig,
) -> TrainState:
    # The boxes carry the axis names from the parameters into the optimizer's state.
    params = init_boxed(model, key, compute)
    return TrainState(jnp.int32(0), params, optimizer.init(params))
