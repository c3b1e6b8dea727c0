"""Cross-entropy with a large softmax, in chunks of positions, with its gradients.

`weighted_losses` is the loss of everything that is trained. The gradients of a chunk
are computed together with its logits, so no array of size positions × vocabulary is
stored for a backward pass, and nothing is computed twice. Its outer loop is over heads:
the layer of a head runs once over whole rows, forward and backward, and only its
softmax is computed in chunks.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.models.device_ops import on_cpu
from bpd_jax.models.partitioning import BATCH_SPEC, constrain, row_parts
from bpd_jax.models.products import summed_rows

# Computes new weights from the probabilities of the targets and the weights; all `[n]`.
Weigh = Callable[[Array, Array], Array]


class LossInputs(NamedTuple):
    """Positions of a batch `[B, T]`, of a chunk `[G, n]`, or of a group of it `[n]`.

    Attributes:
      state: inputs of the softmax.
      targets: rows of the matrix; any of them where the weight is 0.
      weights: factors of the losses.
      teacher: states from which the model itself predicts the targets; None without
        soft targets.
    """

    state: Float[Array, "... D"]
    targets: Int[Array, "..."]
    weights: Float[Array, "..."]
    teacher: Float[Array, "... D"] | None = None


class Losses(NamedTuple):
    """The losses of positions, without gradients.

    Attributes:
      loss: −log p of the target, or the cross-entropy with soft targets, in float32;
        finite but arbitrary where the weight is 0.
      correct: whether the target is ranked first.
    """

    total: Float[Array, ""]
    loss: Float[Array, "..."]
    correct: Bool[Array, "..."]


@dataclasses.dataclass(frozen=True)
class SoftmaxLoss:
    """The static arguments of a cross-entropy, and its sharding.

    Attributes:
      size: V, rows of the softmax matrix.
      dtype: precision of products; sums are float32.
      chunk: positions of a row whose logits are computed at once; None for all.
      mesh: devices that split rows and vocabulary; None for one device.
      trained_columns: number of the last columns of the matrix that have a gradient;
        None for all.
      teacher_share: μ: the target distribution is 1 - μ times the target plus μ times
        the model's own distribution, softmax(teacher · matrixᵀ).
      weigh: computes the weights of a chunk from the probabilities of its targets and
        its weights; no gradient flows through it.
    """

    size: int
    dtype: str = "float32"
    chunk: int | None = None
    mesh: Mesh | None = None
    trained_columns: int | None = None
    teacher_share: float = 0.0
    weigh: Weigh | None = None

    @property
    def groups(self) -> int:
        """G, the number of parts into which the mesh splits a batch."""
        return row_parts(self.mesh)

    def by_group(self, array: Array) -> Array:
        """Reshapes rows `[B, …]` to `[G, B/G, …]`, sharded over G.

        With an axis for the devices, their sums stay separate until the end: gradients
        of the softmax are reduced across devices once rather than for every chunk.
        """
        groups = self.groups
        return self.sharded(array.reshape(groups, -1, *array.shape[1:]), *BATCH_SPEC)

    def gather(self, array: Array) -> Array:
        """The inverse of `by_group`."""
        return self.sharded(array.reshape(-1, *array.shape[2:]), *BATCH_SPEC)

    def sharded(self, array: Array, *axes: Any) -> Array:
        """Constrains the leading axes of an array to mesh axes."""
        return constrain(array, self.mesh, PartitionSpec(*axes))

    def matrix(self, softmax: Float[Array, "V D"]) -> Float[Array, "R D"]:
        """The softmax matrix in the precision of products, gathered before the loops.

        Every device has whole rows. The matrix is padded with zeros to R rows, so that
        the axis `model` can split any vocabulary.
        """
        missing = 0 if self.mesh is None else -self.size % self.mesh.shape["model"]
        weights = jnp.pad(softmax.astype(self.dtype), ((0, missing), (0, 0)))
        return self.sharded(weights, "model", None)

    def logits(
        self, state: Float[Array, "n D"], matrix: Float[Array, "R D"]
    ) -> Float[Array, "n R"]:
        """The logits of a chunk; padding rows of the matrix get probability 0."""
        logits = product("nD,VD->nV", state.astype(matrix.dtype), matrix)
        if len(matrix) == self.size:
            return logits
        # Not -inf: times a probability of 0 it would make the entropy NaN.
        least = jnp.finfo(logits.dtype).min
        return jnp.where(jnp.arange(len(matrix)) < self.size, logits, least)

    def chunks(self, positions: LossInputs) -> LossInputs:
        """Splits `[B, T]` along T into chunks `[chunks, G, n]`.

        The last chunk is padded with positions of weight 0. With C = 4 the chunks of a
        row of T = 6 are 0 1 2 3 | 4 5 - -.
        """
        length = positions.state.shape[1]
        size = min(self.chunk or length, length)
        missing = -length % size

        def cut(array: Array) -> Array:
            rest = array.shape[2:]
            fill = [(0, 0), (0, missing), *[(0, 0)] * len(rest)]
            spread = self.by_group(jnp.pad(array, fill))
            parts = spread.reshape(*spread.shape[:2], -1, size, *rest)
            parts = jnp.moveaxis(parts, 2, 0)
            return parts.reshape(len(parts), self.groups, -1, *rest)

        return jax.tree.map(cut, positions)

    def unchunked(self, parts: Array, batch: int, length: int) -> Array:
        """The inverse of `chunks`: `[B, T, …]` of an array `[chunks, G, n, …]`."""
        rows, rest = batch // self.groups, parts.shape[3:]
        parts = parts.reshape(len(parts), self.groups, rows, -1, *rest)
        whole = jnp.moveaxis(parts, 0, 2).reshape(self.groups, rows, -1, *rest)
        return self.gather(whole[:, :, :length])

    def per_group(
        self, function: Callable[[LossInputs], Any], chunk: LossInputs
    ) -> Any:
        """Maps a function of one group's chunk over all groups; results `[G, …]`."""
        if self.groups > 1:
            return jax.vmap(function)(chunk)
        # On a CPU, a product with an axis of length 1 is slower and needs a copy.
        results = function(jax.tree.map(lambda x: x[0], chunk))
        return jax.tree.map(lambda x: x[None], results)

    def hard_losses(
        self, logits: Float[Array, "n R"], targets: Int[Array, " n"]
    ) -> tuple[Float[Array, " n"], Bool[Array, " n"], Float[Array, " n"]]:
        """−log p of the targets, whether each is ranked first, and the log-sum-exp."""
        if self.mesh is None or self.mesh.size == 1:
            target = jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
        else:
            # If the vocabulary is sharded, indexing would gather the logits.
            is_target = jnp.arange(logits.shape[-1]) == targets[:, None]
            target = jnp.where(is_target, logits, 0).sum(-1)
        peak = logits.max(-1)
        log_total = peak + jnp.log(jnp.exp(logits - peak[:, None]).sum(-1))
        # Cheaper than an argmax, as the log-sum-exp needs the maximum anyway.
        return log_total - target, target == peak, log_total

    def gradients(
        self,
        matrix: Float[Array, "R D"],
        positions: LossInputs,
        by_matrix: Array | None,
        scale: Float[Array, ""] | float = 1.0,
    ) -> tuple[Losses, Float[Array, "B T D"], Array | None]:
        """The losses of `[B, T]` positions, and the gradients of scale · total.

        Args:
          by_matrix: sum of earlier gradients; see `no_gradient`.

        Returns:
          The losses; the gradient with respect to the states, and `by_matrix` plus that
          with respect to the matrix.
        """

        def add(carry: Any, chunk: LossInputs) -> tuple[Any, tuple[Losses, Array]]:
            one = self._chunk_gradients
            losses, by_state, added = self.per_group(lambda x: one(matrix, x), chunk)
            # Scaled after the products, because bfloat16 would round the scale.
            if carry is not None:
                carry = self.sharded(carry + scale * added, *self._gradient_spec)
            return carry, (losses, (scale * by_state).astype(positions.state.dtype))

        chunks = self.chunks(positions)
        by_matrix, (losses, by_state) = jax.lax.scan(add, by_matrix, chunks)
        size = positions.targets.shape
        result = Losses(
            losses.total.sum(),
            self.unchunked(losses.loss, *size),
            self.unchunked(losses.correct, *size),
        )
        return result, self.unchunked(by_state, *size), by_matrix

    def _chunk_gradients(
        self, matrix: Float[Array, "R D"], chunk: LossInputs
    ) -> tuple[Losses, Float[Array, "n D"], Array | None]:
        state, targets, weights, teacher = chunk
        logits = self.logits(state, matrix)
        losses, correct, log_total = self.hard_losses(logits, targets)
        weights = weights.astype(jnp.float32)
        if self.weigh is not None:
            weights = self.weigh(jnp.exp(-losses), weights)
        is_target = jnp.arange(logits.shape[-1]) == targets[:, None]
        error = jnp.exp(logits - log_total[:, None])
        if teacher is None:
            error -= is_target
        else:
            share = self.teacher_share
            shared = matrix[:, : teacher.shape[-1]]
            soft_targets = jax.nn.softmax(self.logits(teacher, shared))
            # −Σ_v q_v log p_v instead of −log p of the target.
            soft_losses = log_total - jnp.sum(soft_targets * logits, axis=1)
            losses = (1 - share) * losses + share * soft_losses
            error -= (1 - share) * is_target + share * soft_targets
        error = error.astype(matrix.dtype)
        by_state = weights[:, None] * product("nV,VD->nD", error, matrix)
        by_matrix = None
        if columns := self._columns(matrix):
            weighted = weights[:, None] * state[:, -columns:]
            weighted = weighted.astype(matrix.dtype)
            if self._by_columns:
                by_matrix = summed_rows(weighted, error)
            else:
                by_matrix = product("nV,nD->VD", error, weighted)
        total = jnp.sum(weights * losses, where=weights != 0)
        return Losses(total, losses, correct), by_state, by_matrix

    def no_gradient(self, matrix: Float[Array, "R D"]) -> Array | None:
        """Zeros `[G, R, columns]` or `[G, columns, R]`; None without such columns."""
        rows, columns = len(matrix), self._columns(matrix)
        if not columns:
            return None
        shape = (columns, rows) if self._by_columns else (rows, columns)
        zeros = jnp.zeros((self.groups, *shape), jnp.float32)
        return self.sharded(zeros, *self._gradient_spec)

    def matrix_gradient(self, by_matrix: Array) -> Float[Array, "V columns"]:
        """The gradient of the softmax from the sums of all groups."""
        total = by_matrix.sum(0)
        return (total.T if self._by_columns else total)[: self.size]

    def _columns(self, matrix: Float[Array, "R D"]) -> int:
        """Number of the matrix's columns that have a gradient."""
        trained = self.trained_columns
        return matrix.shape[1] if trained is None else trained

    @property
    def _by_columns(self) -> bool:
        """Whether the gradient of the softmax matrix is summed transposed.

        On a CPU, bfloat16 products are fastest if the contracted axis is contiguous.
        That needs one transposed operand, and the states are smaller than the logits.
        XLA lacks that product for a few columns.
        """
        bfloat16 = self.dtype == "bfloat16" and on_cpu(self.mesh)
        return bfloat16 and self.trained_columns is None

    @property
    def _gradient_spec(self) -> tuple[Any, ...]:
        return (*BATCH_SPEC, *((None, "model") if self._by_columns else ("model",)))


class Head(NamedTuple):
    """What the loss of one head depends on; with a leading axis, of L heads.

    Others are those of `LossInputs`, and a factor of the loss.

    Attributes:
      layer: parameters of its layer, or other input of `apply`; None if it has none.
        Heads without a layer come first.
    """

    layer: Any
    targets: Int[Array, "*L B T"]
    weights: Array
    teacher: Float[Array, "*L B T D"] | None
    scale: Float[Array, " *L"]

    @property
    def bare(self) -> int:
        """Number of heads without a layer."""
        layers = 0 if self.layer is None else len(jax.tree.leaves(self.layer)[0])
        return len(self.scale) - layers


# Computes the inputs of a head's softmax from its layer and the hidden states.
Apply = Callable[[Any, Array], Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def weighted_losses(
    loss: SoftmaxLoss,
    apply: Apply,
    softmax: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    heads: Head,
) -> tuple[Float[Array, ""], Losses]:
    """Σ_h scale_h · Σ weights_h · loss_h, and the losses of every head.

    Only the sum is differentiable, with respect to `softmax`, `hidden` and the layers.
    Gradients are accumulated over heads and chunks in float32. `apply` computes the
    inputs of a head's softmax, whose matrix all heads share.
    """
    return _forward(loss, apply, softmax, hidden, heads)[0]


def _forward(
    loss: SoftmaxLoss, apply: Apply, softmax: Array, hidden: Array, heads: Head
) -> tuple[tuple[Array, Losses], tuple[Array | None, Array, Any]]:
    """`weighted_losses`, with its gradients as residuals."""
    matrix = loss.matrix(softmax)

    def run(carry: Any, head: Head) -> tuple[Any, tuple[Losses, Any]]:
        by_matrix, by_hidden = carry
        state, pull = jax.vjp(apply, head.layer, hidden)
        positions = LossInputs(state, head.targets, head.weights, head.teacher)
        losses, by_state, by_matrix = loss.gradients(
            matrix, positions, by_matrix, head.scale
        )
        by_layer, by_input = pull(by_state)
        if by_hidden is None:
            by_hidden = loss.sharded(by_input.astype(jnp.float32), *BATCH_SPEC)
        else:
            by_hidden += by_input
        return (by_matrix, by_hidden), (losses, by_layer)

    by_hidden = None
    if not heads.bare:
        by_hidden = jnp.zeros(hidden.shape, jnp.float32)
        by_hidden = loss.sharded(by_hidden, *BATCH_SPEC)
    start = (loss.no_gradient(matrix), by_hidden)
    (by_matrix, by_hidden), losses, by_layers = over_heads(run, start, heads)
    if by_matrix is not None:
        by_matrix = loss.matrix_gradient(by_matrix)
        fixed = softmax.shape[1] - by_matrix.shape[1]
        by_matrix = jnp.pad(by_matrix, ((0, 0), (fixed, 0))).astype(softmax.dtype)
    gradients = (by_matrix, by_hidden.astype(hidden.dtype), by_layers)
    return (jnp.dot(heads.scale, losses.total), losses), gradients


def _backward(
    loss: SoftmaxLoss,
    apply: Apply,
    gradients: tuple[Array | None, Array, Any],
    cotangents: tuple[Array, Losses],
) -> tuple[Any, ...]:
    del loss, apply
    by_matrix, by_hidden, by_layers = jax.tree.map(
        lambda x: (cotangents[0] * x).astype(x.dtype), gradients
    )
    nothing: Any = None
    return by_matrix, by_hidden, Head(by_layers, *[nothing] * 4)


weighted_losses.defvjp(_forward, _backward)


def over_heads(
    run: Callable[[Any, Head], tuple[Any, tuple[Any, Any]]], carry: Any, heads: Head
) -> tuple[Any, Any, Any]:
    """`lax.scan` over the heads, preceded by those without a layer.

    Returns:
      The last carry; the first results, stacked over all heads; and the second ones,
      stacked over the heads that have a layer.
    """
    results = []
    without = heads._replace(layer=None)
    for index in range(heads.bare):
        carry, (first, _) = run(carry, jax.tree.map(lambda x, i=index: x[i], without))
        results.append(jax.tree.map(lambda x: x[None], first))
    rest = None
    if heads.layer is not None:
        # Faster than an unrolled loop on a CPU, and it needs a sixth of the memory.
        others = jax.tree.map(lambda x: x[heads.bare :], without)
        carry, (others_first, rest) = jax.lax.scan(
            run, carry, others._replace(layer=heads.layer)
        )
        results.append(others_first)
    return carry, jax.tree.map(lambda *x: jnp.concatenate(x), *results), rest


def product(equation: str, a: Array, b: Array) -> Array:
    """`jnp.einsum` of two arrays with sums in float32, whatever their dtype."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
