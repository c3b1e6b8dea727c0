"""How the loss of the heads is laid out over chunks of rows and over devices."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.partitioning import BATCH_SPEC
from bpd_jax.models.products import on_cpu, summed_rows
from bpd_jax.typing import Array, Bool, Float, Int


class LossSums(NamedTuple):
    """Sums over the valid positions, of one head or stacked `[L]`; float32.

    Attributes:
      loss: −log p of the targets.
      correct: targets that the head ranks first.
      entropy: of the head, in nats; None in training.
    """

    loss: Array
    correct: Array
    entropy: Array | None = None


class Chunk(NamedTuple):
    """n positions: C of every row of one device; `[G, n, …]` for all G devices."""

    state: Float[Array, "n D"]
    targets: Int[Array, " n"]
    valid: Bool[Array, " n"]


@dataclasses.dataclass(frozen=True)
class HeadsLoss:
    """What the loss of the heads depends on besides arrays.

    Attributes:
      model: sizes.
      chunk: positions of a row whose logits exist at once; None for all.
      mesh: devices that split rows and vocabulary; None for one device.
    """

    model: BlockwiseConfig
    chunk: int | None = None
    mesh: Mesh | None = None

    @property
    def groups(self) -> int:
        """G, the parts that the mesh splits a batch into."""
        if self.mesh is None:
            return 1
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    def spread(self, array: Array) -> Array:
        """Rows `[B, …]` as `[G, B/G, …]`, where each device keeps its own.

        With the devices as an axis of their own, what they add up each for itself
        stays apart until the end: gradients of the softmax cross the links once, not
        once per chunk.
        """
        groups = self.groups
        return self.pin(array.reshape(groups, -1, *array.shape[1:]), *BATCH_SPEC)

    def gather(self, array: Array) -> Array:
        """The inverse of `spread`."""
        return self.pin(array.reshape(-1, *array.shape[2:]), *BATCH_SPEC)

    def pin(self, array: Array, *axes: Any) -> Array:
        """Lays the leading axes of an array on mesh axes, if there are any."""
        if self.mesh is None or self.mesh.size == 1:
            return array
        sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
        return jax.lax.with_sharding_constraint(array, sharding)

    def rows(self) -> int:
        """V, filled up to a multiple of the devices that split it."""
        size = self.model.trunk.vocab_size
        return size if self.mesh is None else size + -size % self.mesh.shape["model"]

    def matrix(self, softmax: Float[Array, "V D"]) -> Float[Array, "R D"]:
        """The softmax in the model's precision, whole rows on every device.

        Gathered once, before the loops. Rows of zeros fill it up to R, `rows()`, so
        that `model` splits any vocabulary.
        """
        weights = softmax.astype(self.model.trunk.dtype)
        missing = self.rows() - len(weights)
        return self.pin(jnp.pad(weights, ((0, missing), (0, 0))), "model", None)

    def logits(
        self, state: Float[Array, "n D"], weights: Float[Array, "R D"]
    ) -> Float[Array, "n R"]:
        """Of a chunk; those of rows that only fill up have no probability."""
        logits = product("nD,VD->nV", state, weights)
        size = self.model.trunk.vocab_size
        if len(weights) == size:
            return logits
        # Not -inf, which times a probability of 0 would make the entropy NaN.
        least = jnp.finfo(logits.dtype).min
        return jnp.where(jnp.arange(len(weights)) < size, logits, least)

    @property
    def by_columns(self) -> bool:
        """Whether the gradient of the softmax's matrix is summed as `[D, R]`.

        A CPU multiplies bfloat16 fastest with the numbers that are summed side by side.
        That needs one operand transposed, and states are smaller than logits.
        """
        return self.model.trunk.dtype == "bfloat16" and on_cpu(self.mesh)

    def by_matrix(
        self, error: Float[Array, "n R"], state: Float[Array, "n D"]
    ) -> Float[Array, "R D"] | Float[Array, "D R"]:
        """The gradient of the softmax's matrix from that of a chunk's logits."""
        if self.by_columns:
            return summed_rows(state, error)
        return product("nV,nD->VD", error, state)

    def chunks(self, state: Array, targets: Array, valid: Array) -> Chunk:
        """`[B, T]` cut along T: `[chunks, G, n]`.

        The last chunk is filled up with positions that are not valid. With C = 4 the
        positions of a row of T = 6 are 0 1 2 3 | 4 5 - -.
        """
        length = state.shape[1]
        size = min(self.chunk or length, length)
        missing = -length % size

        def cut(array: Array) -> Array:
            rest = array.shape[2:]
            fill = [(0, 0), (0, missing), *[(0, 0)] * len(rest)]
            spread = self.spread(jnp.pad(array, fill))
            parts = spread.reshape(*spread.shape[:2], -1, size, *rest)
            parts = jnp.moveaxis(parts, 2, 0)
            return parts.reshape(len(parts), self.groups, -1, *rest)

        return Chunk(cut(state), cut(targets), cut(valid))

    def joined(
        self, parts: Float[Array, "chunks G n D"], batch: int, length: int
    ) -> Float[Array, "B T D"]:
        """The inverse of `chunks`, of states."""
        rows, width = batch // self.groups, parts.shape[-1]
        parts = parts.reshape(len(parts), self.groups, rows, -1, width)
        whole = jnp.moveaxis(parts, 0, 2).reshape(self.groups, rows, -1, width)
        return self.gather(whole[:, :, :length])

    def on_each(self, function: Callable[[Chunk], Any], chunk: Chunk) -> Any:
        """Calls a function of one device's chunk for all; results are `[G, …]`."""
        if self.groups > 1:
            return jax.vmap(function)(chunk)
        # A product with an axis of length 1 is slower on a CPU, and needs a copy.
        results = function(jax.tree.map(lambda x: x[0], chunk))
        return jax.tree.map(lambda x: x[None], results)

    def sums(
        self, logits: Float[Array, "n R"], chunk: Chunk, *, entropies: bool = False
    ) -> tuple[LossSums, Float[Array, "n R"]]:
        """A chunk's sums, and the gradient of its summed loss by the logits."""
        is_target = jnp.arange(logits.shape[-1]) == chunk.targets[:, None]
        if self.mesh is None or self.mesh.size == 1:
            target = jnp.take_along_axis(logits, chunk.targets[:, None], -1)[:, 0]
        else:
            # Where the vocabulary is split, a gather would put it together.
            target = jnp.where(is_target, logits, 0).sum(-1)
        peak = logits.max(-1)
        log_total = peak + jnp.log(jnp.exp(logits - peak[:, None]).sum(-1))
        chances = jnp.exp(logits - log_total[:, None])

        def total(values: Array) -> Float[Array, ""]:
            return jnp.sum(values, where=chunk.valid, dtype=jnp.float32)

        # Cheaper than an argmax: the maximum is known from the log-sum-exp.
        sums = LossSums(total(log_total - target), total(target == peak))
        if entropies:
            entropy = log_total - (chances * logits).sum(-1)
            sums = sums._replace(entropy=total(entropy))
        return sums, jnp.where(chunk.valid[:, None], chances - is_target, 0)


def product(equation: str, a: Array, b: Array) -> Array:
    """Sums in float32, whatever the precision of the factors."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
