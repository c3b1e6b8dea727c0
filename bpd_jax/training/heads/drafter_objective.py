"""The training objective of a block drafter, on texts with random anchors."""

import dataclasses
import functools
import pathlib
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import Array, Float, Int, Params
from bpd_jax.models.attachment_files import save_drafter
from bpd_jax.models.attachments import About
from bpd_jax.models.block_drafter import FROZEN, with_softmax
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.products import float32_sums
from bpd_jax.models.trained_refiners import markov_factors, markov_queries
from bpd_jax.training.heads.drafter_batches import BlockBatch, BlockBatcher
from bpd_jax.training.heads.heads_objective import BaseObjective
from bpd_jax.training.heads.positions import Positions
from bpd_jax.training.heads.states_cache import States
from bpd_jax.training.objective import Levels

# Standard deviation of the logits of an untrained drafter, and the number of rows of
# the softmax that it is computed from.
_LARGEST_SPREAD, _ROWS = 5.0, 4096


@dataclasses.dataclass(frozen=True)
class DrafterObjective(BaseObjective):
    """The objective of a block drafter; λ sums to 1, and D-PACE uses other weights."""

    @property
    def drafter(self) -> BlockDrafterConfig:
        assert isinstance(self.config.heads, BlockDrafterConfig)
        return self.config.heads

    @property
    def functions(self) -> DrafterFunctions:
        """The functions of the block drafter in the precision of training."""
        trunk = dataclasses.replace(
            self.model.trunk, dtype=self.config.products, param_dtype="float32"
        )
        return DrafterFunctions(self.drafter.resolve(self.model.trunk), trunk)

    @property
    def lambdas(self) -> Float[Array, " levels"]:
        """λ_j, whose sum is 1."""
        return super().lambdas / sum(self.config.lambdas)

    @property
    def trained_columns(self) -> int:
        """The columns of a Markov head."""
        return self.drafter.markov_rank

    def init(
        self, params: Params, vocabulary: np.ndarray | None, rng: Array
    ) -> tuple[Params, Params]:
        """Initial drafter; frozen are softmax, vocabulary and the model's embedding."""
        trained = jax.jit(self.functions.init)(rng)
        softmax = softmax_rows(self.model, params, None)
        frozen = {
            name: value
            for name, value in with_softmax({}, softmax, vocabulary).items()
            if name in FROZEN
        }
        if self.model.trunk.norm == "rms":
            scale = jnp.asarray(params["trunk"]["final_norm"]["scale"], jnp.float32)
            trained["final_norm"]["scale"] = bounded_scale(scale, frozen["softmax"])
        frozen["softmax"] = jnp.asarray(frozen["softmax"], self.config.products)
        return trained, {**frozen, "embedding": params["trunk"]["embedding"]}

    def levels(self, trained: Params, frozen: Params, batch: BlockBatch) -> Levels:
        """The softmaxes of a batch, and the loss of the confidence head."""
        config, levels = self.config, super().levels(trained, frozen, batch)
        scored = levels.targets.scored.astype(jnp.float32)
        if config.position_weights == "dpace":
            weigh = functools.partial(
                dpace_weights, config.levels, config.dpace_smoothing
            )
            weights = scored / jnp.maximum(scored.sum(), 1)
            levels = levels._replace(weights=weights, weigh=weigh)
        if not self.drafter.confidence:
            return levels
        # The columns after the states are those of a Markov head.
        states = levels.inputs[..., : self.model.trunk.d_model]
        more = functools.partial(self._confidence_loss, trained, batch, states, scored)
        return levels._replace(more=more)

    def _confidence_loss(
        self,
        trained: Params,
        batch: BlockBatch,
        states: Float[Array, "n levels D"],
        scored: Float[Array, "n levels"],
        hits: Array,
    ) -> Array:
        """Cross-entropy of predicting whether the first candidate is right.

        Only the confidence head has a gradient.
        """
        head = jax.lax.stop_gradient(trained) | {"confidence": trained["confidence"]}
        logits = self.functions.confidence_logits(
            head, jax.lax.stop_gradient(states), _previous(batch)
        )
        # log(1 + e^x) - x · target.
        losses = jax.nn.softplus(logits) - logits * hits
        return jnp.sum(losses * scored) / jnp.maximum(scored.sum(), 1)

    def batcher(self, states: States, positions: Positions) -> BlockBatcher:
        """Batches of cached states, which contain those of prompts too."""
        config = self.config
        return BlockBatcher(
            states,
            positions,
            config.block_size,
            config.anchors_per_row,
            config.block_rows,
            self.drafter.window,
            config.row_tokens,
            config.levels if config.soft_targets else 0,
        )

    def save(
        self, folder: pathlib.Path, params: Params, **about: Unpack[About]
    ) -> None:
        config, dtype = self.functions.config, self.config.heads_dtype
        save_drafter(folder, config, params, dtype=dtype, **about)

    def softmax_inputs(
        self, trained: Params, frozen: Params, batch: BlockBatch
    ) -> tuple[Float[Array, "n levels R"], Float[Array, "1 draft R"]]:
        """Inputs and matrix of the softmax, whose products are the logits.

        A Markov head adds columns: [state, s_j ∘ E[y_{j-1}]] · [softmax, U]ᵀ.
        """
        tokens = jnp.asarray(batch.tokens)
        with float32_sums():
            states = self.functions.teacher_forced_states(
                trained,
                self.features(batch.states),
                jnp.asarray(batch.offsets)[:, None] + jnp.arange(batch.states.shape[1]),
                frozen["embedding"][tokens[..., 0]],
                jnp.asarray(batch.anchors),
            )
        states, matrix = states.reshape(-1, *states.shape[2:]), frozen["softmax"]
        if not self.drafter.markov_rank:
            return states, matrix[None]
        head = trained["markov"]
        factors = markov_factors(head, states)
        embedded = markov_queries(head, _previous(batch), 1, factors)
        output = head["output"].astype(matrix.dtype)
        return (
            jnp.concatenate([states, embedded.astype(states.dtype)], axis=-1),
            jnp.concatenate([matrix, output], axis=-1)[None],
        )

    def teacher_states(self, batch: BlockBatch) -> Float[Array, "n levels D"] | None:
        """The states of the row after each token of a block but the last."""
        if not self.config.soft_targets:
            return None
        hidden, levels = self.hidden(batch.states), self.config.levels
        places = jnp.asarray(batch.anchors)[..., None] + jnp.arange(levels)
        states = jnp.take_along_axis(
            hidden, places.reshape(len(hidden), -1)[..., None], axis=1, mode="clip"
        )
        return states.reshape(-1, levels, hidden.shape[-1])


def bounded_scale(
    scale: Float[Array, " D"], softmax: Float[Array, "draft D"]
) -> Float[Array, " D"]:
    """The scale of the drafter's last norm at the beginning: the model's, but bounded.

    The frozen softmax expects the model's. States of an untrained drafter have random
    directions, for which the logits of some models are as different as 45 (Gemma 3
    270M; SmolLM2: 4): losses would begin far above that of guessing.
    """
    rows = softmax[:: len(softmax) // _ROWS + 1].astype(jnp.float32)
    spread = jnp.median(jnp.linalg.norm((rows - rows.mean(0)) * scale, axis=1))
    return scale * jnp.minimum(1.0, _LARGEST_SPREAD / spread)


def dpace_weights(
    levels: int,
    smoothing: float,
    probabilities: Float[Array, " n"],
    weights: Float[Array, " n"],
) -> Float[Array, " n"]:
    """D-PACE (arXiv 2605.18810): level weights that count the later levels.

    With q_i = (1 - α) p_i + α and P_j = Π_{i≤j} q_i, the weight of level j is
    Σ_{i≥j} P_i: the expected number of accepted levels that need it.

    >>> probabilities, ones = jnp.array([1.0, 0.5]), jnp.ones(2)
    >>> dpace_weights(2, 0.0, probabilities, ones).tolist()
    [1.5, 0.5]

    Args:
      levels: L - 1; the n values are blocks of `levels` values.
      smoothing: α, which keeps weights from vanishing at the start of training.
      weights: factors; 0 where there is no target.
    """
    present = (weights > 0).reshape(-1, levels)
    smooth = (1 - smoothing) * probabilities.reshape(-1, levels) + smoothing
    prefix = jnp.cumprod(jnp.where(present, smooth, 1.0), axis=1) * present
    later = jnp.cumsum(prefix[:, ::-1], axis=1)[:, ::-1]
    return (later * weights.reshape(-1, levels)).ravel()


def _previous(batch: BlockBatch) -> Int[Array, "n levels"]:
    """y_0 … y_{L-2}, the tokens before the predicted ones."""
    tokens = jnp.asarray(batch.tokens)[..., :-1]
    return tokens.reshape(-1, tokens.shape[-1])
