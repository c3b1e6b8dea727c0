"""One step of training and one of evaluation, jitted over a mesh."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from bpd_jax.data.rows import Batch
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.partitioning import BATCH_SPEC, replicated
from bpd_jax.training.loss import HeadSums, blockwise_loss
from bpd_jax.training.state import TrainState
from bpd_jax.typing import Array, Params

Metrics: TypeAlias = dict[str, Array]
TrainStep: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvalStep: TypeAlias = Callable[[Params, Batch], HeadSums]


def make_train_step(
    model: BlockwiseConfig,
    optimizer: optax.GradientTransformation,
    lambdas: tuple[float, ...],
    abstract: TrainState,
    mesh: Mesh,
) -> TrainStep:
    """Builds `(state, batch) → (state, metrics)`; it consumes the state it is given.

    The metrics are `loss`, `loss_heads` and `accuracy_heads` (both `[L]`) and
    `gradient_norm`, before clipping.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        def loss_of(params: Params) -> tuple[Array, HeadSums]:
            return blockwise_loss(model, params, batch, lambdas)

        (loss, sums), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            state.params
        )
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        count = jnp.maximum(sums.valid, 1)
        metrics = {
            "loss": loss,
            "loss_heads": sums.loss / count,
            "accuracy_heads": sums.correct / count,
            "gradient_norm": optax.global_norm(gradients),
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    state_shardings = jax.tree.map(lambda x: x.sharding, abstract)
    batch_sharding = NamedSharding(mesh, BATCH_SPEC)
    return jax.jit(
        step,
        in_shardings=(state_shardings, batch_sharding),
        out_shardings=(state_shardings, replicated(mesh)),
        donate_argnums=0,
    )


def make_eval_step(
    model: BlockwiseConfig,
    lambdas: tuple[float, ...],
    abstract: TrainState,
    mesh: Mesh,
) -> EvalStep:
    """Builds `(params, batch) → sums per head`, to be added up over batches."""

    def step(params: Params, batch: Batch) -> HeadSums:
        return blockwise_loss(model, params, batch, lambdas)[1]

    param_shardings = jax.tree.map(lambda x: x.sharding, abstract.params)
    return jax.jit(
        step,
        in_shardings=(param_shardings, NamedSharding(mesh, BATCH_SPEC)),
        out_shardings=replicated(mesh),
    )


def put_batch(batch: Batch, mesh: Mesh) -> Any:
    """The batch as arrays over the mesh, from each process's own rows of it."""
    sharding = NamedSharding(mesh, BATCH_SPEC)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x), batch
    )
