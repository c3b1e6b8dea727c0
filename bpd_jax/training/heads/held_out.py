"""How well heads or a block drafter guess texts, as sums over positions."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from bpd_jax.typing import AnyArray, Array, Bool, Float, Int

RANKS = 16
TOPS = (1, 2, 4, 8, 16)


class HeldOut(NamedTuple):
    """Sums over positions for levels 1 … L-1; they add up over batches.

    Attributes:
      loss: `[L-1]` −log p of the targets in the draft vocabulary.
      ranks: `[L-1, 16]` how often the target is the candidate of each rank.
      scored: `[L-1]` targets in the draft vocabulary.
      valid: `[L-1]` all targets.
      chain: `[L-1]` how often the first candidates of this and all earlier levels are
        right: what verification of a single draft accepts.
    """

    loss: Float[AnyArray, " levels"]
    ranks: Float[AnyArray, "levels ranks"]
    scored: Float[AnyArray, " levels"]
    valid: Float[AnyArray, " levels"]
    chain: Float[AnyArray, " levels"]

    @property
    def accuracies(self) -> list[list[float]]:
        """`[j][r]`: how often the candidate of rank r of level j + 1 is right."""
        found = np.asarray(self.ranks) / np.maximum(np.asarray(self.valid), 1)[:, None]
        return [[round(float(x), 5) for x in head] for head in found]

    @property
    def losses(self) -> list[float]:
        """Mean −log p of the scored targets, nats per token, of levels 1 … L-1."""
        return _shares(self.loss, self.scored)

    @property
    def coverage(self) -> list[float]:
        """Share of the targets of levels 1 … L-1 that are in the draft vocabulary."""
        return _shares(self.scored, self.valid)

    @property
    def chains(self) -> list[float]:
        """Probabilities that levels 1 … j of one draft are all right."""
        return _shares(self.chain, self.valid)

    @property
    def tokens_per_call(self) -> float:
        """Expected accepted tokens per call with one draft, the certain one included.

        1 + Σ_j P(levels 1 … j are right), each over the positions whose text goes on
        that far, under the text's own tokens.
        """
        return round(1 + sum(self.chains), 4)

    def tops(self) -> dict[int, list[float]]:
        """By k: how often the k best candidates of levels 1 … L-1 hold the target."""
        rising = np.cumsum(self.accuracies, axis=1)
        return {k: [round(float(x), 5) for x in rising[:, k - 1]] for k in TOPS}

    def metrics(self, prefix: str = "validation") -> dict[str, float]:
        """A row of numbers for `metrics.jsonl`; heads are counted from 2."""
        row = {
            f"{prefix}_loss": float(np.mean(self.losses)),
            f"{prefix}_tokens_per_call": self.tokens_per_call,
        }
        for head, loss in enumerate(self.losses, start=2):
            row[f"{prefix}_loss_head_{head}"] = loss
        for k, accuracies in self.tops().items():
            for head, accuracy in enumerate(accuracies, start=2):
                row[f"{prefix}_top_{k}_head_{head}"] = accuracy
        for head, chain in enumerate(self.chains, start=2):
            row[f"{prefix}_chain_head_{head}"] = chain
        return row

    def facts(self) -> dict[str, object]:
        """All of it as JSON can hold it."""
        return {
            "accuracies": self.accuracies,
            "top": self.tops(),
            "loss": self.losses,
            "coverage": self.coverage,
            "chain": self.chains,
            "tokens_per_call": self.tokens_per_call,
            "positions": int(np.asarray(self.valid)[0]),
        }

    def table(self) -> str:
        """A table of accuracies, one line per head."""
        tops = "".join(f"{f'top-{k}':>8}" for k in TOPS)
        lines = [f"head    loss {tops}   chain"]
        columns = zip(self.losses, self.chains, *self.tops().values(), strict=True)
        for head, (loss, chain, *accuracies) in enumerate(columns, start=2):
            cells = "".join(f"{accuracy:8.1%}" for accuracy in accuracies)
            lines.append(f"{head:4} {loss:7.3f} {cells}{chain:8.1%}")
        lines.append(f"tokens per call with one draft: {self.tokens_per_call:.3f}")
        return "\n".join(lines)


def rank_counts(
    ranks: Int[Array, "levels n"], scored: Bool[Array, "levels n"]
) -> Float[Array, "levels ranks"]:
    """How often targets have each of the first ranks."""
    hits = (ranks[..., None] == jnp.arange(RANKS)) & scored[..., None]
    return hits.sum(1, dtype=jnp.float32)


def chain_counts(
    ranks: Int[Array, "levels n"],
    scored: Bool[Array, "levels n"],
    valid: Bool[Array, "levels n"],
) -> Float[Array, " levels"]:
    """How often the first candidates of the levels up to each one are all right."""
    right = jnp.cumprod((ranks == 0) & scored & valid, axis=0)
    return right.sum(1, dtype=jnp.float32)


def _shares(part: AnyArray, whole: AnyArray) -> list[float]:
    found = np.asarray(part) / np.maximum(np.asarray(whole), 1)
    return [round(float(x), 5) for x in found]
