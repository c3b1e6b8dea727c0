"""How well heads guess held-out texts."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.models.config import BlockHeadsConfig
from bpd_jax.models.heads import apply_head, layer_shapes
from bpd_jax.training.heads.batches import PositionBatch
from bpd_jax.training.heads.loss import chunk_size, draft_targets
from bpd_jax.typing import Array, Float, Params

RANKS = 16
TOPS = (1, 2, 4, 8, 16)


class HeldOut(NamedTuple):
    """Sums over held-out positions for heads 2 … L; they add up over batches.

    Attributes:
      loss: `[L-1]` −log p of the targets in the draft vocabulary.
      ranks: `[L-1, 16]` how often the target is the head's candidate of each rank.
      scored: `[L-1]` targets in the draft vocabulary.
      valid: `[L-1]` all targets.
    """

    loss: Float[Array, " levels"]
    ranks: Float[Array, "levels ranks"]
    scored: Float[Array, " levels"]
    valid: Float[Array, " levels"]

    @property
    def accuracies(self) -> list[list[float]]:
        """`[j][r]`: how often the candidate of rank r of head j + 2 is right."""
        found = np.asarray(self.ranks) / np.maximum(np.asarray(self.valid), 1)[:, None]
        return [[round(float(x), 5) for x in head] for head in found]

    @property
    def losses(self) -> list[float]:
        """Mean −log p of the scored targets, nats per token, of heads 2 … L."""
        found = np.asarray(self.loss) / np.maximum(np.asarray(self.scored), 1)
        return [round(float(x), 5) for x in found]

    @property
    def coverage(self) -> list[float]:
        """Share of the targets of heads 2 … L that are in the draft vocabulary."""
        found = np.asarray(self.scored) / np.maximum(np.asarray(self.valid), 1)
        return [round(float(x), 5) for x in found]

    def tops(self) -> dict[int, list[float]]:
        """By k: how often the k best candidates of heads 2 … L hold the target."""
        rising = np.cumsum(self.accuracies, axis=1)
        return {k: [round(float(x), 5) for x in rising[:, k - 1]] for k in TOPS}

    def metrics(self) -> dict[str, float]:
        """A row of numbers for `metrics.jsonl`."""
        row = {"validation_loss": float(np.mean(self.losses))}
        for head, loss in enumerate(self.losses, start=2):
            row[f"validation_loss_head_{head}"] = loss
        for k, accuracies in self.tops().items():
            for head, accuracy in enumerate(accuracies, start=2):
                row[f"validation_top_{k}_head_{head}"] = accuracy
        return row

    def table(self) -> str:
        """A table of accuracies, one line per head."""
        lines = ["head    loss " + "".join(f"{f'top-{k}':>8}" for k in TOPS)]
        columns = zip(self.losses, *self.tops().values(), strict=True)
        for head, (loss, *accuracies) in enumerate(columns, start=2):
            cells = "".join(f"{accuracy:8.1%}" for accuracy in accuracies)
            lines.append(f"{head:4} {loss:7.3f} {cells}")
        return "\n".join(lines)


def measure(
    config: BlockHeadsConfig,
    heads: Params,
    matrix: Float[Array, "draft D"] | None,
    vocab_size: int,
    batches: list[PositionBatch],
    *,
    products: str = "float32",
) -> HeldOut:
    """Sums over some batches of equal size; see `loss_and_gradients`."""
    found = [
        jax.device_get(_measure(config, products, vocab_size, heads, matrix, batch))
        for batch in batches
    ]
    return HeldOut(*(np.sum(column, axis=0) for column in zip(*found, strict=True)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _measure(
    config: BlockHeadsConfig,
    products: str,
    vocab_size: int,
    heads: Params,
    matrix: Array | None,
    batch: PositionBatch,
) -> HeldOut:
    tokens, valid = (jnp.asarray(x)[:, 1:] for x in (batch.tokens, batch.valid))
    targets = draft_targets(tokens, valid, heads.get("vocabulary"), vocab_size)
    states = jnp.asarray(batch.states).astype(products)
    width = states.shape[-1]
    rows = heads["softmax"].shape[1] if matrix is None else matrix.shape[0]
    chunk = chunk_size(len(states), rows)

    def add_level(carry: None, level: Any) -> tuple[None, tuple[Array, Array]]:
        weights, own, target = level
        softmax = jnp.asarray(matrix if own is None else own, products)

        def look(part: Any) -> tuple[Array, Array]:
            state, places, scored = part
            state = apply_head(config, weights, state, dtype=products)
            logits = jnp.einsum(
                "nD,VD->nV", state, softmax, preferred_element_type=jnp.float32
            )
            found = jnp.take_along_axis(logits, places[:, None], 1)
            losses = jax.nn.logsumexp(logits, 1) - found[:, 0]
            rank = jnp.sum(logits > found, 1)
            hits = (rank[:, None] == jnp.arange(RANKS)) & scored[:, None]
            return jnp.sum(losses, where=scored), hits.sum(0, dtype=jnp.float32)

        parts = (
            states.reshape(-1, chunk, width),
            target.places.reshape(-1, chunk),
            target.scored.reshape(-1, chunk),
        )
        losses, hits = jax.lax.map(look, parts)
        return carry, (losses.sum(), hits.sum(0))

    layers = {name: heads[name] for name in layer_shapes(config, width)}
    own = heads["softmax"] if matrix is None else None
    _, (loss, ranks) = jax.lax.scan(add_level, None, (layers, own, targets))
    return HeldOut(loss, ranks, _count(targets.scored), _count(targets.valid))


def _count(marks: Array) -> Array:
    return marks.sum(1, dtype=jnp.float32)
