"""Layout of the heads' loss over chunks of rows and over devices."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bpd_jax.models.blockwise_config import BlockwiseConfig
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
    """n positions: C of every row of a device; `[G, n, …]` for all G groups of rows."""

    state: Float[Array, "n D"]
    targets: Int[Array, " n"]
    valid: Bool[Array, " n"]


@dataclasses.dataclass(frozen=True)
class LossLayout:
    """The static arguments of the heads' loss.

    Attributes:
      model: sizes.
      chunk: positions of a row whose logits are computed at once; None for all.
      mesh: devices that split rows and vocabulary; None for one device.
    """

    model: BlockwiseConfig
    chunk: int | None = None
    mesh: Mesh | None = None

    @property
    def groups(self) -> int:
        """G, the number of parts into which the mesh splits a batch."""
        if self.mesh is None:
            return 1
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    def spread(self, array: Array) -> Array:
        """Reshapes rows `[B, …]` to `[G, B/G, …]`, sharded over G.

        With an axis for the devices, their sums stay separate until the end: gradients
        of the softmax are reduced across devices once rather than for every chunk.
        """
        groups = self.groups
        return self.pin(array.reshape(groups, -1, *array.shape[1:]), *BATCH_SPEC)

    def gather(self, array: Array) -> Array:
        """The inverse of `spread`."""
        return self.pin(array.reshape(-1, *array.shape[2:]), *BATCH_SPEC)

    def pin(self, array: Array, *axes: Any) -> Array:
        """Constrains the leading axes of an array to mesh axes."""
        if self.mesh is None or self.mesh.size == 1:
            return array
        sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
        return jax.lax.with_sharding_constraint(array, sharding)

    def rows(self) -> int:
        """R: V, padded to a multiple of the devices that split the vocabulary."""
        size = self.model.trunk.vocab_size
        return size if self.mesh is None else size + -size % self.mesh.shape["model"]

    def matrix(self, softmax: Float[Array, "V D"]) -> Float[Array, "R D"]:
        """The softmax matrix in the model's dtype, gathered once before the loops.

        Every device has whole rows. The matrix is padded with zeros to R rows (`rows`),
        so that the axis `model` can split any vocabulary.
        """
        weights = softmax.astype(self.model.trunk.dtype)
        missing = self.rows() - len(weights)
        return self.pin(jnp.pad(weights, ((0, missing), (0, 0))), "model", None)

    def logits(
        self, state: Float[Array, "n D"], weights: Float[Array, "R D"]
    ) -> Float[Array, "n R"]:
        """The logits of a chunk; padding rows of the matrix get probability 0."""
        logits = product("nD,VD->nV", state, weights)
        size = self.model.trunk.vocab_size
        if len(weights) == size:
            return logits
        # Not -inf: times a probability of 0 it would make the entropy NaN.
        least = jnp.finfo(logits.dtype).min
        return jnp.where(jnp.arange(len(weights)) < size, logits, least)

    @property
    def by_columns(self) -> bool:
        """Whether the gradient of the softmax matrix is summed as `[D, R]`.

        On a CPU, bfloat16 products are fastest if the contracted axis is contiguous.
        That needs one transposed operand, and the states are smaller than the logits.
        """
        return self.model.trunk.dtype == "bfloat16" and on_cpu(self.mesh)

    def by_matrix(
        self, error: Float[Array, "n R"], state: Float[Array, "n D"]
    ) -> Float[Array, "R D"] | Float[Array, "D R"]:
        """The gradient of the softmax matrix from that of a chunk's logits."""
        if self.by_columns:
            return summed_rows(state, error)
        return product("nV,nD->VD", error, state)

    def chunks(self, state: Array, targets: Array, valid: Array) -> Chunk:
        """Splits `[B, T]` along T into chunks `[chunks, G, n]`.

        The last chunk is padded with invalid positions. With C = 4 the chunks of a row
        of T = 6 are 0 1 2 3 | 4 5 - -.
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
        """The inverse of `chunks` for states."""
        rows, width = batch // self.groups, parts.shape[-1]
        parts = parts.reshape(len(parts), self.groups, rows, -1, width)
        whole = jnp.moveaxis(parts, 0, 2).reshape(self.groups, rows, -1, width)
        return self.gather(whole[:, :, :length])

    def on_each(self, function: Callable[[Chunk], Any], chunk: Chunk) -> Any:
        """Maps a function of one group's chunk over all groups; results `[G, …]`."""
        if self.groups > 1:
            return jax.vmap(function)(chunk)
        # On a CPU, a product with an axis of length 1 is slower and needs a copy.
        results = function(jax.tree.map(lambda x: x[0], chunk))
        return jax.tree.map(lambda x: x[None], results)

    def sums(
        self, logits: Float[Array, "n R"], chunk: Chunk, *, entropies: bool = False
    ) -> tuple[LossSums, Float[Array, "n R"]]:
        """The sums of a chunk, and the gradient of its loss with respect to the logits.

        Args:
          logits: logits of the chunk.
          chunk: targets and mask.
          entropies: whether to sum the entropies.
        """
        is_target = jnp.arange(logits.shape[-1]) == chunk.targets[:, None]
        if self.mesh is None or self.mesh.size == 1:
            target = jnp.take_along_axis(logits, chunk.targets[:, None], -1)[:, 0]
        else:
            # If the vocabulary is sharded, indexing would gather the logits.
            target = jnp.where(is_target, logits, 0).sum(-1)
        peak = logits.max(-1)
        log_total = peak + jnp.log(jnp.exp(logits - peak[:, None]).sum(-1))
        probabilities = jnp.exp(logits - log_total[:, None])

        def total(values: Array) -> Float[Array, ""]:
            return jnp.sum(values, where=chunk.valid, dtype=jnp.float32)

        # Cheaper than an argmax, as the log-sum-exp needs the maximum anyway.
        sums = LossSums(total(log_total - target), total(target == peak))
        if entropies:
            entropy = log_total - (probabilities * logits).sum(-1)
            sums = sums._replace(entropy=total(entropy))
        return sums, jnp.where(chunk.valid[:, None], probabilities - is_target, 0)


def product(equation: str, a: Array, b: Array) -> Array:
    """`jnp.einsum` of two arrays with sums in float32, whatever their dtype."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
