"""What heads, block drafters and refiners of a frozen model minimize.

All of them predict y_1 … y_{L-1} after y_0, which is certain: a cross-entropy of L - 1
*levels*, whose softmax is given by the frozen model. They differ in the inputs of that
softmax, which a subclass of `Objective` computes (`levels`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Bool, Float, Params, PyTree
from bpd_jax.training.cross_entropy import Weigh
from bpd_jax.training.draft_targets import Targets
from bpd_jax.training.heads.held_out import HeldOut, LevelSums
from bpd_jax.training.levels_loss import by_level, levels_loss, levels_ranks


class Levels(NamedTuple):
    """The softmaxes of all levels at n positions.

    Attributes:
      inputs, matrices: their products are the logits; levels may share a matrix.
      targets: targets in the draft vocabulary.
      weights: factors of the losses in their sum.
      teacher: states from which the model itself predicts the targets; None without
        soft targets.
      teacher_share, trained_columns, weigh: see `SoftmaxLoss`.
      more: computes what is added to the loss, from whether each target is ranked
        first; None for nothing.
    """

    inputs: Float[Array, "n levels R"]
    matrices: Float[Array, "#levels draft R"]
    targets: Targets
    weights: Float[Array, "n levels"]
    teacher: Float[Array, "n levels D"] | None = None
    teacher_share: float = 0.0
    trained_columns: int = 0
    weigh: Weigh | None = None
    more: Callable[[Bool[Array, "n levels"]], Array] | None = None

    def ranks(self) -> tuple[Float[Array, "n levels"], Array]:
        """−log p and rank, from 0, of each target."""
        arrays = (self.inputs, self.targets.places)
        return by_level(levels_ranks, self.matrices, arrays)


class Objective:
    """A training objective; its subclasses are frozen dataclasses, static under jit.

    Attributes:
      mesh: devices that split a batch; None for one device.
    """

    mesh: Mesh | None = None

    def levels(self, trained: Params, frozen: PyTree, batch: Any) -> Levels:
        """The softmaxes of a batch."""
        raise NotImplementedError

    def held_out_sums(self, trained: Params, frozen: PyTree, batch: Any) -> Any:
        """Sums over a held-out batch: a named tuple with a method `metrics(prefix)`.

        Levels read the true earlier tokens of their block.
        """
        levels = self.levels(trained, frozen, batch)
        return HeldOut.of(*levels.ranks(), levels.targets)

    def loss(
        self, trained: Params, frozen: PyTree, batch: Any
    ) -> tuple[Float[Array, ""], LevelSums]:
        """The weighted sum of −log p of all targets, and the sums for the metrics."""
        levels = self.levels(trained, frozen, batch)
        total, losses, hits = by_level(
            functools.partial(
                levels_loss,
                trained_columns=levels.trained_columns,
                teacher_share=levels.teacher_share,
                weigh=levels.weigh,
                mesh=self.mesh,
            ),
            levels.matrices,
            (levels.inputs, levels.targets.places, levels.weights, levels.teacher),
        )
        if levels.more is not None:
            total += levels.more(hits)
        return total, LevelSums.of(losses, hits, levels.targets)


def level_weights(
    scored: Bool[Array, "n levels"], lambdas: Float[Array, " levels"]
) -> Float[Array, "n levels"]:
    """λ_j over the number of positions that have a target at level j."""
    return scored * lambdas / jnp.maximum(scored.sum(0), 1)
