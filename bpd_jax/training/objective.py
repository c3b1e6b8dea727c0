"""What heads, block drafters and refiners of a frozen model minimize and measure.

All of them predict y_1 … y_{L-1} after y_0, which is certain: a cross-entropy of L - 1
*levels*, whose softmax is given by the frozen model. They differ in the inputs of that
softmax, which a subclass of `Objective` computes (`levels`). Their losses and
accuracies are sums over positions.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bpd_jax.base.typing import AnyArray, Array, Bool, Float, Int, Params, PyTree
from bpd_jax.training.cross_entropy import Weigh
from bpd_jax.training.levels_loss import Targets, by_level, levels_loss, levels_ranks
from bpd_jax.training.validation import per_head

RANKS = 16
TOPS = (1, 2, 4, 8, 16)


class LevelSums(NamedTuple):
    """Sums over positions for heads 2 … L; they add up over batches.

    Attributes:
      loss: −log p of the targets in the draft vocabulary.
      correct: targets that the head ranks first.
      scored: targets in the draft vocabulary.
      valid: all targets; those outside the draft vocabulary are misses.
    """

    loss: Float[AnyArray, " levels"]
    correct: Float[AnyArray, " levels"]
    scored: Float[AnyArray, " levels"]
    valid: Float[AnyArray, " levels"]

    @classmethod
    def of(
        cls,
        losses: Float[Array, "n levels"],
        hits: Bool[Array, "n levels"],
        targets: Targets,
    ) -> "LevelSums":
        """The sums of n positions: −log p of each target, and whether it is first."""
        scored = targets.scored
        return cls(
            jnp.sum(losses, axis=0, where=scored),
            jnp.sum(hits & scored, axis=0, dtype=jnp.float32),
            scored.sum(0, dtype=jnp.float32),
            targets.valid.sum(0, dtype=jnp.float32),
        )


class HeldOut(NamedTuple):
    """Sums over positions for levels 1 … L-1; they add up over batches.

    Attributes:
      sums: losses and numbers of targets.
      ranks: number of targets that are the candidate of each rank.
      chain: number of positions at which the first candidates of this and all earlier
        levels are right, which verification of a single draft accepts.
    """

    sums: LevelSums
    ranks: Float[AnyArray, "levels ranks"]
    chain: Float[AnyArray, " levels"]

    @classmethod
    def of(
        cls,
        losses: Float[Array, "n levels"],
        ranks: Int[Array, "n levels"],
        targets: Targets,
    ) -> "HeldOut":
        """The sums of n positions, from the loss and the rank of each target."""
        scored = targets.scored
        hits = (ranks[..., None] == jnp.arange(RANKS)) & scored[..., None]
        chains = jnp.cumprod((ranks == 0) & scored, axis=1)
        return cls(
            LevelSums.of(losses, ranks == 0, targets),
            hits.sum(0, dtype=jnp.float32),
            chains.sum(0, dtype=jnp.float32),
        )

    @property
    def accuracies(self) -> list[list[float]]:
        """`[j][r]`: share of right candidates of rank r of level j + 1."""
        return [_shares(head, self.sums.valid[j]) for j, head in enumerate(self.ranks)]

    @property
    def losses(self) -> list[float]:
        """Mean −log p of the scored targets, nats per token, of levels 1 … L-1."""
        return _shares(self.sums.loss, self.sums.scored)

    @property
    def coverage(self) -> list[float]:
        """Share of the targets of levels 1 … L-1 that are in the draft vocabulary."""
        return _shares(self.sums.scored, self.sums.valid)

    @property
    def chains(self) -> list[float]:
        """Probabilities that levels 1 … j of a single draft are all right."""
        return _shares(self.chain, self.sums.valid)

    @property
    def tokens_per_call(self) -> float:
        """Expected accepted tokens per call with one draft, the certain one included.

        1 + Σ_j P(levels 1 … j are right), each over the positions with a target at
        level j, given the tokens of the text.
        """
        return round(1 + sum(self.chains), 4)

    def tops(self) -> dict[int, list[float]]:
        """Top-k accuracies of levels 1 … L-1 by k."""
        rising = np.cumsum(self.accuracies, axis=1)
        return {k: [round(float(x), 5) for x in rising[:, k - 1]] for k in TOPS}

    def metrics(self, prefix: str = "validation") -> dict[str, float]:
        """A row of numbers for `metrics.jsonl`; heads are counted from 2."""
        row = {
            f"{prefix}_loss": float(np.mean(self.losses)),
            f"{prefix}_tokens_per_call": self.tokens_per_call,
        }
        row |= per_head(f"{prefix}_loss", self.losses, 2)
        for k, accuracies in self.tops().items():
            row |= per_head(f"{prefix}_top_{k}", accuracies, 2)
        return row | per_head(f"{prefix}_chain", self.chains, 2)

    def facts(self) -> dict[str, object]:
        return {
            "accuracies": self.accuracies,
            "top": self.tops(),
            "loss": self.losses,
            "coverage": self.coverage,
            "chain": self.chains,
            "tokens_per_call": self.tokens_per_call,
            "positions": int(np.asarray(self.sums.valid)[0]),
        }

    def table(self) -> str:
        """A text table of losses and accuracies, one line per head."""
        tops = "".join(f"{f'top-{k}':>8}" for k in TOPS)
        lines = [f"head    loss {tops}   chain"]
        columns = zip(self.losses, self.chains, *self.tops().values(), strict=True)
        for head, (loss, chain, *accuracies) in enumerate(columns, start=2):
            cells = "".join(f"{accuracy:8.1%}" for accuracy in accuracies)
            lines.append(f"{head:4} {loss:7.3f} {cells}{chain:8.1%}")
        lines.append(f"tokens per call with one draft: {self.tokens_per_call:.3f}")
        return "\n".join(lines)


def _shares(part: AnyArray, whole: AnyArray) -> list[float]:
    shares = np.asarray(part) / np.maximum(np.asarray(whole), 1)
    return [round(float(x), 5) for x in shares]


class Levels(NamedTuple):
    """The softmaxes of all levels at n positions.

    Attributes:
      inputs, matrices: their products are the logits; levels may share a matrix.
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


class Objective(abc.ABC):
    """A training objective; its subclasses are frozen dataclasses, static under jit.

    Attributes:
      mesh: devices that split a batch; None for one device.
    """

    mesh: Mesh | None = None

    @abc.abstractmethod
    def levels(self, trained: Params, frozen: PyTree, batch: Any) -> Levels:
        """The softmaxes of a batch."""

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
