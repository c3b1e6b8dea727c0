"""One step of training and one of evaluation, jitted over a mesh."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bpd_jax.base.typing import Array, Float, Params
from bpd_jax.data.rows import Batch
from bpd_jax.models.partitioning import BATCH_SPEC, replicated, row_parts
from bpd_jax.training.loss import BlockwiseLoss, HeadSums
from bpd_jax.training.state import TrainState

Metrics: TypeAlias = dict[str, Array]


def make_train_step(
    objective: BlockwiseLoss,
    lambdas: tuple[float, ...],
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the jitted train step `(state, batch) → (state, metrics)`.

    The state, whose shapes are `abstract`, is donated. `lambdas` are the weights λ_h of
    the heads' losses. Gradients have the dtype of the parameters (float32 by default),
    independent of the dtype of the model's computations.

    The metrics are `loss`, `loss_heads` and `accuracy_heads` (both `[L]`),
    `gradient_norm`, before clipping, and `finite`: whether loss and gradient norm are
    finite. If they are not, the state, including its step, is unchanged.
    """
    mesh = objective.mesh
    assert mesh is not None

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        scale = objective.head_scale(batch, lambdas, state.step)

        def part_gradient(part: Batch) -> tuple[tuple[Array, HeadSums], Params]:
            gradient = jax.value_and_grad(objective.scaled, has_aux=True)
            return gradient(state.params, part, scale, state.step)

        (loss, sums), gradients = _summed(part_gradient, batch, objective)
        count = jnp.maximum(sums.valid, 1)
        means = {
            "loss_heads": sums.loss / count,
            "accuracy_heads": sums.correct / count,
        }
        after, metrics = updated(optimizer, state, loss, gradients)
        return after, means | metrics

    state_shardings = jax.tree.map(lambda x: x.sharding, abstract)
    batch_sharding = NamedSharding(mesh, BATCH_SPEC)
    return jax.jit(
        step,
        in_shardings=(state_shardings, batch_sharding),
        out_shardings=(state_shardings, replicated(mesh)),
        donate_argnums=0,
    )


def make_eval_step(
    objective: BlockwiseLoss, abstract: TrainState
) -> jax.stages.Wrapped:
    """Builds the jitted evaluation step `(params, batch) → HeadSums`.

    The sums include the entropies of the heads; the targets are always those of the
    text. A batch is divided by `compute.accumulate`, so that evaluation needs no more
    memory than training.
    """
    mesh = objective.mesh
    assert mesh is not None

    def step(params: Params, batch: Batch) -> HeadSums:
        sums = functools.partial(objective.evaluation_sums, params)
        return _summed(sums, batch, objective)

    param_shardings = jax.tree.map(lambda x: x.sharding, abstract.params)
    return jax.jit(
        step,
        in_shardings=(param_shardings, NamedSharding(mesh, BATCH_SPEC)),
        out_shardings=replicated(mesh),
    )


def _summed(
    function: Callable[[Batch], Any], batch: Batch, objective: BlockwiseLoss
) -> Any:
    """The sum of a function over `compute.accumulate` parts, added up in float32."""
    count, mesh = objective.compute.accumulate, objective.mesh
    assert mesh is not None
    if count == 1:
        return function(batch)

    def add(total: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(part)), None

    parts = split_rows(batch, count, mesh)
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shapes
    )
    total, _ = jax.lax.scan(add, zeros, parts)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), total, shapes)


def split_rows(batch: Batch, parts: int, mesh: Mesh) -> Batch:
    """Splits a batch into `[parts, B/parts, T]`; every row stays on its device.

    Every part takes an equal share of each device's own rows: of rows 0 1 2 3 on one
    device and 4 5 6 7 on another, the first of two parts gets 0 1 4 5. The rows of a
    device must be a multiple of `parts`; see `TrainConfig.check_mesh`.
    """
    groups = row_parts(mesh)
    sharding = NamedSharding(mesh, PartitionSpec(None, *BATCH_SPEC))

    def split(array: Array) -> Array:
        shared = array.reshape(groups, parts, -1, *array.shape[1:]).swapaxes(0, 1)
        cut = shared.reshape(parts, -1, *array.shape[1:])
        return jax.lax.with_sharding_constraint(cut, sharding)

    return jax.tree.map(split, batch)


def updated(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    loss: Float[Array, ""],
    gradients: Params,
) -> tuple[TrainState, Metrics]:
    """Applies the optimizer.

    If the loss or the gradient norm is not finite, the state, including its step, is
    unchanged. The metrics are `loss`, `gradient_norm` and `finite`.
    """
    norm = optax.global_norm(gradients)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    after = TrainState(state.step + 1, params, opt_state)
    after = jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, state)
    return after, {"loss": loss, "gradient_norm": norm, "finite": finite}
