"""The training objective of block heads, on independent positions."""

import dataclasses
import functools
import pathlib
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import Array, Float, Params
from bpd_jax.models.attachments import About
from bpd_jax.models.block_heads import (
    apply_head,
    condition,
    init_heads,
    is_trained,
    layer_shapes,
    softmax_rows,
)
from bpd_jax.models.blockwise_config import BlockHeadsConfig
from bpd_jax.models.heads_files import save_heads
from bpd_jax.training.heads.base_objective import BaseObjective
from bpd_jax.training.heads.batches import PositionBatch, PositionBatcher
from bpd_jax.training.heads.positions import Positions
from bpd_jax.training.heads.states_cache import States


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
