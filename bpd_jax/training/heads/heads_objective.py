"""The training objective of block heads, on independent positions."""

import dataclasses
import functools
import pathlib
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bpd_jax.base.typing import AnyArray, Array, Float, Params
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
from bpd_jax.models.heads_files import save_heads
from bpd_jax.storage.buckets import on_disk
from bpd_jax.training.draft_targets import targets_of
from bpd_jax.training.frozen import Batches, LevelSums
from bpd_jax.training.heads.batches import (
    PositionBatch,
    Ring,
    cached_batches,
    held_out_batches,
    ring_batches,
)
from bpd_jax.training.heads.frozen_states import FrozenModel
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.heads.held_out import HeldOut
from bpd_jax.training.heads.positions import training_sample
from bpd_jax.training.heads.run_plan import Plan
from bpd_jax.training.heads.states_cache import STATES, cached_states
from bpd_jax.training.levels_loss import by_level, levels_loss, levels_ranks

# Texts that are added to a ring at a time.
_GROUP = 32


@dataclasses.dataclass(frozen=True)
class HeadsObjective:
    """See `frozen.Objective`.

    Attributes:
      config: settings of the run.
      model: sizes of the frozen model.
      mesh: devices that split a batch; None for one device.
    """

    config: HeadsTrainConfig
    model: BlockwiseConfig
    mesh: Mesh | None = None

    @property
    def heads(self) -> BlockHeadsConfig:
        """Sizes of the heads."""
        assert isinstance(self.config.heads, BlockHeadsConfig)
        return self.config.heads

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that conditioned heads read."""
        return self.heads.feature_layers

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

    def loss(
        self, trained: Params, frozen: Params, batch: PositionBatch
    ) -> tuple[Array, LevelSums]:
        """The loss of a batch of positions, and the sums.

        The loss is Σ_h λ_h loss_h, where loss_h is the mean of −log p_h over the
        positions that have a target in the draft vocabulary.
        """
        config = self.config
        targets = targets_of(batch, frozen, self.model)
        inputs, matrices = self._softmax_inputs(trained, frozen, batch)
        lambdas = jnp.asarray(config.lambdas, jnp.float32)
        weights = targets.scored * lambdas / jnp.maximum(targets.scored.sum(0), 1)
        later = None if batch.later is None else self._hidden(batch.later)
        total, losses, hits = by_level(
            functools.partial(
                levels_loss,
                trained_columns=inputs.shape[-1] if self.heads.own_softmax else 0,
                teacher_share=config.soft_targets,
                mesh=self.mesh,
            ),
            matrices,
            (inputs, targets.places, weights, later),
        )
        return total, LevelSums.of(losses, hits, targets)

    def held_out_sums(
        self, trained: Params, frozen: Params, batch: PositionBatch
    ) -> HeldOut:
        """Sums over a batch of positions."""
        targets = targets_of(batch, frozen, self.model)
        inputs, matrices = self._softmax_inputs(trained, frozen, batch)
        losses, ranks = by_level(levels_ranks, matrices, (inputs, targets.places))
        return HeldOut.of(losses, ranks, targets)

    def _softmax_inputs(
        self, trained: Params, frozen: Params, batch: PositionBatch
    ) -> tuple[Float[Array, "n levels D"], Float[Array, "#levels draft D"]]:
        """Inputs of the heads' softmaxes, and their matrices or the shared one."""
        config, products = self.heads, self.config.products
        states = self._hidden(batch.states).astype(products)
        side = None
        if config.is_conditioned:
            side = self._side(trained["kernel_condition"], frozen, batch)
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

    def _hidden(self, states: AnyArray) -> Float[Array, "... D"]:
        """The final hidden states, the first part of cached states."""
        return jnp.asarray(states)[..., : self.model.trunk.d_model]

    def _side(
        self, kernel: Float[Array, "I C"], frozen: Params, batch: PositionBatch
    ) -> Float[Array, "n C"]:
        """The additional input of conditioned heads; see `block_heads.condition`."""
        embedded = None
        if self.heads.reads_anchor:
            embedded = frozen["embedding"][jnp.asarray(batch.tokens)[:, 0]]
        features = jnp.asarray(batch.states)[:, self.model.trunk.d_model :]
        kernel = kernel.astype(self.config.products)
        return condition(self.heads, kernel, embedded, features)

    def batches(
        self, base: FrozenModel, plan: Plan, folder: pathlib.Path, step: int
    ) -> Batches:
        """Batches from the cache, or from a ring of states."""
        config, positions = self.config, plan.positions
        size, block = config.batch_size, config.block_size

        def evaluated(indices: np.ndarray, states: np.ndarray) -> list[PositionBatch]:
            return held_out_batches(positions, indices, states, size, block)

        if config.mode == "cache":
            states = cached_states(
                config.states or on_disk(folder / STATES),
                plan.texts,
                base,
                plan.base,
                include_prompts=config.include_prompts,
            )
            source = cached_batches(
                states,
                plan.train,
                size,
                block,
                config.seed,
                step,
                later=config.soft_targets > 0,
            )
            sample = training_sample(plan.train, plan.held_out)
            return Batches(
                source,
                evaluated(plan.held_out, states.read(plan.held_out)),
                evaluated(sample, states.read(sample)),
            )
        held_out = evaluated(plan.held_out, _held_out_states(plan, base))
        ring = Ring(
            plan.texts,
            positions,
            np.unique(positions.rows[plan.train]),
            base,
            capacity=config.ring_positions,
            group=_GROUP,
            # A resumed run reads the texts in another order.
            seed=config.seed + step,
        )
        return Batches(
            ring_batches(ring, positions, size, block, config.ring_uses), held_out
        )

    def save(
        self, folder: pathlib.Path, params: Params, **about: Unpack[About]
    ) -> None:
        """Writes a folder of heads; see `heads_files`."""
        save_heads(folder, self.heads, params, dtype=self.config.heads_dtype, **about)


def _held_out_states(plan: Plan, base: FrozenModel) -> np.ndarray:
    """`[n, C]`: states of the held-out positions, computed now."""
    positions, texts = plan.positions, plan.texts
    held_out_states = np.empty((len(plan.held_out), base.width), base.dtype)
    rows = np.unique(positions.rows[plan.held_out])
    for number, states in base.states([texts[row] for row in rows]):
        in_text = np.flatnonzero(positions.rows[plan.held_out] == rows[number])
        places = positions.places[plan.held_out[in_text]] - texts.offsets[rows[number]]
        held_out_states[in_text] = states[places]
    return held_out_states
