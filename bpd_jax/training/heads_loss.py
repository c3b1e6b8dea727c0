"""Cross-entropy of all heads: one head's logits of one chunk of the rows at a time.

Heads are the outer loop: a head's own layer runs once over whole rows, forward and
backward, and only its softmax is cut into chunks. Gradients are found while the logits
are there, so nothing of size V is kept or computed twice.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.heads import apply_head
from bpd_jax.models.partitioning import BATCH_SPEC
from bpd_jax.typing import Array, Bool, Float, Int, Params


class Sums(NamedTuple):
    """Sums over the valid positions, of one head or stacked `[L]`; float32.

    Attributes:
      loss: −log p of the targets.
      correct: targets that the head ranks first.
      entropy: of the head, in nats; None in training.
    """

    loss: Array
    correct: Array
    entropy: Array | None = None


class _Head(NamedTuple):
    """One head's share of the arguments; `weights` may be None."""

    weights: Params | None
    targets: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    scale: Float[Array, ""]


class _Chunk(NamedTuple):
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

    def vocabulary(self, size: int) -> str | None:
        """The mesh axis that splits a vocabulary, if it can be split evenly."""
        if self.mesh is None or size % self.mesh.shape["model"]:
            return None
        return "model"

    def matrix(self, softmax: Float[Array, "V D"]) -> Float[Array, "V D"]:
        """The softmax in the model's precision, whole rows on every device.

        Gathered once, before the loops.
        """
        weights = softmax.astype(self.model.trunk.dtype)
        return self.pin(weights, self.vocabulary(len(weights)), None)

    def chunks(self, state: Array, targets: Array, valid: Array) -> _Chunk:
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

        return _Chunk(cut(state), cut(targets), cut(valid))

    def joined(
        self, parts: Float[Array, "chunks G n D"], batch: int, length: int
    ) -> Float[Array, "B T D"]:
        """The inverse of `chunks`, of states."""
        rows, width = batch // self.groups, parts.shape[-1]
        parts = parts.reshape(len(parts), self.groups, rows, -1, width)
        whole = jnp.moveaxis(parts, 0, 2).reshape(self.groups, rows, -1, width)
        return self.gather(whole[:, :, :length])

    def on_each(self, function: Callable[[_Chunk], Any], chunk: _Chunk) -> Any:
        """Calls a function of one device's chunk for all; results are `[G, …]`."""
        if self.groups > 1:
            return jax.vmap(function)(chunk)
        # A product with an axis of length 1 is slower on a CPU, and needs a copy.
        found = function(jax.tree.map(lambda x: x[0], chunk))
        return jax.tree.map(lambda x: x[None], found)

    def sums(
        self, logits: Float[Array, "n V"], chunk: _Chunk, *, entropies: bool = False
    ) -> tuple[Sums, Float[Array, "n V"]]:
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
        sums = Sums(total(log_total - target), total(target == peak))
        if entropies:
            entropy = log_total - (chances * logits).sum(-1)
            sums = sums._replace(entropy=total(entropy))
        return sums, jnp.where(chunk.valid[:, None], chances - is_target, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def heads_loss(
    how: HeadsLoss,
    heads: Params | None,
    softmax: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "L B T"],
    valid: Bool[Array, "L B T"],
    scale: Float[Array, " L"],
) -> tuple[Float[Array, ""], Float[Array, " L"], Float[Array, " L"]]:
    """Σ_h scale_h · loss_h of summed losses; then loss and correct targets per head.

    Only the first result has a gradient, with respect to `heads`, `softmax` and
    `hidden`. Differentiation adds up over heads and chunks in float32.
    """
    sums = heads_sums(how, heads, softmax, hidden, targets, valid, entropies=False)
    return jnp.dot(scale, sums.loss), sums.loss, sums.correct


def heads_sums(
    how: HeadsLoss,
    heads: Params | None,
    softmax: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "L B T"],
    valid: Bool[Array, "L B T"],
    *,
    entropies: bool = True,
) -> Sums:
    """The sums of every head, `[L]` each."""
    weights = how.matrix(softmax)

    def run(carry: None, head: _Head) -> tuple[None, tuple[Sums, None]]:
        state = _head_state(how.model, head.weights, hidden)

        def one(chunk: _Chunk) -> Sums:
            logits = _logits(chunk.state, weights)
            return how.sums(logits, chunk, entropies=entropies)[0]

        def add(total: Sums, chunk: _Chunk) -> tuple[Sums, None]:
            return _plus(total, how.on_each(one, chunk)), None

        nothing = jnp.float32(0)
        zero = Sums(nothing, nothing, nothing if entropies else None)
        chunks = how.chunks(state, head.targets, head.valid)
        return carry, (jax.lax.scan(add, zero, chunks)[0], None)

    scale = jnp.zeros(len(targets))
    return _over_heads(how.model, run, None, _Head(heads, targets, valid, scale))[1]


def best_tokens(
    how: HeadsLoss,
    heads: Params | None,
    softmax: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
) -> Int[Array, "B T"]:
    """The token that head 1 holds for likeliest at every position; no gradient."""
    first = None
    if how.model.heads is not None and how.model.heads.first_has_ffn:
        assert heads is not None
        first = jax.tree.map(lambda x: x[0], heads)
    first, softmax, hidden = jax.lax.stop_gradient((first, softmax, hidden))
    weights = how.matrix(softmax)
    state = _head_state(how.model, first, hidden)

    def one(chunk: _Chunk) -> Int[Array, " n"]:
        return jnp.argmax(_logits(chunk.state, weights), axis=-1)

    def best(carry: None, chunk: _Chunk) -> tuple[None, Int[Array, "G n"]]:
        return carry, how.on_each(one, chunk)

    nothing = jnp.zeros(hidden.shape[:2], jnp.int32)
    _, parts = jax.lax.scan(best, None, how.chunks(state, nothing, nothing))
    return how.joined(parts[..., None], *hidden.shape[:2])[..., 0]


def _forward(
    how: HeadsLoss,
    heads: Params | None,
    softmax: Array,
    hidden: Array,
    targets: Array,
    valid: Array,
    scale: Array,
) -> tuple[tuple[Array, Array, Array], tuple[Params | None, Array, Array]]:
    """`heads_loss`, and its gradients as residuals."""
    weights = how.matrix(softmax)
    vocabulary = how.vocabulary(len(weights))

    def run(carry: Any, head: _Head) -> tuple[Any, tuple[Sums, Params | None]]:
        by_softmax, by_hidden = carry
        state, pull = jax.vjp(
            functools.partial(_head_state, how.model), head.weights, hidden
        )

        def one(chunk: _Chunk) -> tuple[Sums, Array, Array]:
            found, error = how.sums(_logits(chunk.state, weights), chunk)
            error = error.astype(weights.dtype)
            by_state = _product("nV,VD->nD", error, weights)
            return found, by_state, _product("nV,nD->VD", error, chunk.state)

        def add(carry: Any, chunk: _Chunk) -> tuple[Any, Array]:
            total, by_softmax = carry
            found, by_state, by_weights = how.on_each(one, chunk)
            # Scaled after the products: one over a count is too small for float16.
            by_softmax += head.scale * by_weights
            by_softmax = how.pin(by_softmax, *BATCH_SPEC, vocabulary)
            by_state = (head.scale * by_state).astype(state.dtype)
            return (_plus(total, found), by_softmax), by_state

        zero = Sums(jnp.float32(0), jnp.float32(0))
        chunks = how.chunks(state, head.targets, head.valid)
        (found, by_softmax), parts = jax.lax.scan(add, (zero, by_softmax), chunks)
        by_head, by_input = pull(how.joined(parts, *hidden.shape[:2]))
        return (by_softmax, by_hidden + by_input), (found, by_head)

    zeros = jnp.zeros((how.groups, *softmax.shape), jnp.float32)
    start = (
        how.pin(zeros, *BATCH_SPEC, vocabulary),
        how.pin(jnp.zeros(hidden.shape, jnp.float32), *BATCH_SPEC),
    )
    (by_softmax, by_hidden), sums, by_heads = _over_heads(
        how.model, run, start, _Head(heads, targets, valid, scale)
    )
    gradients = (
        by_heads,
        by_softmax.sum(0).astype(softmax.dtype),
        by_hidden.astype(hidden.dtype),
    )
    return (jnp.dot(scale, sums.loss), sums.loss, sums.correct), gradients


def _backward(
    how: HeadsLoss,
    gradients: tuple[Params | None, Array, Array],
    cotangents: tuple[Array, Array, Array],
) -> tuple[Any, ...]:
    del how
    scaled = jax.tree.map(lambda x: (cotangents[0] * x).astype(x.dtype), gradients)
    return (*scaled, None, None, None)


heads_loss.defvjp(_forward, _backward)


def _over_heads(
    model: BlockwiseConfig,
    run: Callable[[Any, _Head], tuple[Any, tuple[Sums, Any]]],
    carry: Any,
    heads: _Head,
) -> tuple[Any, Sums, Any]:
    """`lax.scan` over the heads, preceded by head 1 if it has no layer of its own.

    Args:
      model: sizes.
      run: what to do with each head.
      carry: handed from head to head.
      heads: all of them, stacked.

    Returns:
      The last carry; the sums, stacked to `[L]`; and the rest of what `run` returns,
      stacked over the heads that have a layer.
    """
    weights, *per_head = heads
    plain = model.block_size - (0 if model.heads is None else model.heads.num_ffns)
    sums = []
    for index in range(plain):
        carry, (first, _) = run(carry, _Head(None, *(x[index] for x in per_head)))
        sums.append(jax.tree.map(lambda x: x[None], first))
    rest = None
    if weights is not None:
        # Faster than an unrolled loop on a CPU, and it needs a sixth of the memory.
        others = _Head(weights, *(x[plain:] for x in per_head))
        carry, (found, rest) = jax.lax.scan(run, carry, others)
        sums.append(found)
    return carry, jax.tree.map(lambda *x: jnp.concatenate(x), *sums), rest


def _head_state(
    model: BlockwiseConfig, weights: Params | None, hidden: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """What a head hands to its softmax."""
    if weights is None:
        return hidden
    assert model.heads is not None
    return apply_head(model.heads, weights, hidden, dtype=model.trunk.dtype)


def _logits(
    state: Float[Array, "n D"], weights: Float[Array, "V D"]
) -> Float[Array, "n V"]:
    return _product("nD,VD->nV", state, weights)


def _product(equation: str, a: Array, b: Array) -> Array:
    """Sums in float32, whatever the precision of the factors."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _plus(total: Sums, found: Sums) -> Sums:
    """Adds the sums of all devices."""
    return jax.tree.map(lambda a, b: a + b.sum(0), total, found)
