"""What the training objectives of block heads and of a block drafter share."""

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import AnyArray, Array, Float, Params
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
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
