"""The training objective of block heads, and what it shares with that of a drafter."""

import abc
import dataclasses
import functools
import pathlib
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bpd_jax.base.typing import AnyArray, Array, Float, Params
from bpd_jax.models.attachment_files import save_heads
from bpd_jax.models.attachments import About
from bpd_jax.models.block_heads import (
    apply_head,
    condition,
    init_heads,
    is_trained,
    layer_shapes,
    softmax_rows,
)
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.training.heads.batches import PositionBatch, PositionBatcher
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.heads.positions import Positions
from bpd_jax.training.heads.states_cache import States
from bpd_jax.training.levels_loss import targets_of
from bpd_jax.training.objective import Levels, Objective


@dataclasses.dataclass(frozen=True)
class BaseObjective(Objective):
    """The loss is Σ_j λ_j loss_j, the mean over the targets of level j."""

    config: HeadsTrainConfig
    model: BlockwiseConfig
    mesh: Mesh | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the model whose outputs are read."""
        return self.config.heads.feature_layers

    @abc.abstractmethod
    def softmax_inputs(
        self, trained: Params, frozen: Params, batch: Any
    ) -> tuple[Float[Array, "n levels R"], Float[Array, "#levels draft R"]]:
        """Inputs and matrices of the softmax, whose products are the logits."""

    @abc.abstractmethod
    def teacher_states(self, batch: Any) -> Float[Array, "n levels D"] | None:
        """The model's final states after y_0 … y_{L-2}; None if they are not needed.

        They are arbitrary past a text's end.
        """

    @property
    def lambdas(self) -> Float[Array, " levels"]:
        """λ_j."""
        return jnp.asarray(self.config.lambdas, jnp.float32)

    @property
    @abc.abstractmethod
    def trained_columns(self) -> int:
        """Number of the last columns of the matrices that are trained."""

    def levels(self, trained: Params, frozen: Params, batch: Any) -> Levels:
        targets = targets_of(batch, frozen, self.model)
        counts = jnp.maximum(targets.scored.sum(0), 1)
        inputs, matrices = self.softmax_inputs(trained, frozen, batch)
        return Levels(
            inputs,
            matrices,
            targets,
            targets.scored * self.lambdas / counts,
            self.teacher_states(batch),
            self.config.soft_targets,
            self.trained_columns,
        )

    def hidden(self, states: AnyArray) -> Float[Array, "... D"]:
        """The final hidden states, the first part of cached states."""
        return jnp.asarray(states)[..., : self.model.trunk.d_model]

    def features(self, states: AnyArray) -> Float[Array, "... F"]:
        """The outputs of `layers`, the rest of cached states."""
        return jnp.asarray(states)[..., self.model.trunk.d_model :]


@dataclasses.dataclass(frozen=True)
class HeadsObjective(BaseObjective):
    """The objective of heads 2 … L."""

    @property
    def heads(self) -> BlockHeadsConfig:
        assert isinstance(self.config.heads, BlockHeadsConfig)
        return self.config.heads

    @property
    def trained_columns(self) -> int:
        """All columns of the heads' own softmaxes."""
        return self.model.trunk.d_model if self.heads.own_softmax else 0

    def init(
        self, params: Params, vocabulary: np.ndarray | None, rng: Array
    ) -> tuple[Params, Params]:
        """Initial heads; frozen are their shared softmax `matrix` and `vocabulary`."""
        heads = init_heads(self.model, params, self.heads, rng, vocabulary)
        trained = {k: v for k, v in heads.items() if is_trained(self.heads, k)}
        frozen = {k: v for k, v in heads.items() if k == "vocabulary"}
        if not self.heads.own_softmax:
            rows = heads.get("softmax", softmax_rows(self.model, params, None))
            frozen["matrix"] = jnp.asarray(rows, self.config.products)
        if self.heads.reads_anchor:
            frozen["embedding"] = params["trunk"]["embedding"]
        return trained, frozen

    def softmax_inputs(
        self, trained: Params, frozen: Params, batch: PositionBatch
    ) -> tuple[Float[Array, "n levels R"], Float[Array, "#levels draft R"]]:
        """Inputs of the heads' softmaxes, and their matrices or the shared one."""
        config, products = self.heads, self.config.products
        states = self.hidden(batch.states).astype(products)
        side = None
        if config.is_conditioned:
            embedded = None
            if config.reads_anchor:
                embedded = frozen["embedding"][jnp.asarray(batch.tokens)[:, 0]]
            kernel = trained["kernel_condition"].astype(products)
            side = condition(config, kernel, embedded, self.features(batch.states))
            side = side.astype(products)

        # Of the inner layers only the products are kept for the gradient.
        keep = jax.checkpoint_policies.dots_saveable

        @functools.partial(jax.checkpoint, policy=keep)
        def apply(weights: Params) -> Array:
            return apply_head(config, weights, states, side, dtype=products)

        names = layer_shapes(config, states.shape[-1])
        inputs = jax.lax.map(apply, {name: trained[name] for name in names})
        matrices = trained["softmax"] if config.own_softmax else frozen["matrix"][None]
        return jnp.moveaxis(inputs, 0, 1), matrices.astype(products)

    def teacher_states(self, batch: PositionBatch) -> Float[Array, "n levels D"] | None:
        """The states of the next positions, which batches have with soft targets."""
        return None if batch.later is None else self.hidden(batch.later)

    def batcher(self, states: States, positions: Positions) -> PositionBatcher:
        del positions
        config = self.config
        return PositionBatcher(
            states, config.batch_size, config.block_size, config.soft_targets > 0
        )

    def save(
        self, folder: pathlib.Path, params: Params, **about: Unpack[About]
    ) -> None:
        save_heads(folder, self.heads, params, dtype=self.config.heads_dtype, **about)
