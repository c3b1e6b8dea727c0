"""Attention kernels against a float32 reference: error and time.

An error is the largest difference, of outputs and of gradients, relative to the largest
value of the reference. The reference is plain attention in float32 with products of the
highest precision.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator_parts.jobs import Job, JobSettings, Row, seconds_of
from bpd_jax.base.typing import Array
from bpd_jax.models.attention import attention, causal_mask
from bpd_jax.models.prefix_attention import prefix_attention
from bpd_jax.models.segment_attention import Segments, fused

# bfloat16 has 8 significant bits, and some devices multiply float32 with 10.
TOLERANCE = 0.03


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows B, tokens T, query heads N, key-value heads K of width H."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    width: int


SHAPES = {
    "1.5B": Shape(8, 512, 12, 12, 128),
    "SmolLM2": Shape(8, 512, 9, 3, 64),
    "7B": Shape(2, 2048, 32, 32, 128),
}
_TINY = {"tiny": Shape(2, 128, 2, 1, 16)}

# By platform: flash attention if it exists, and the alternatives.
_KERNELS = {
    "gpu": ("xla", "cudnn"),
    "tpu": ("xla", "pallas"),
    "cpu": ("xla", "fused", "pallas"),
}


def jobs(settings: JobSettings) -> Iterator[Job]:
    """Training kernels at each shape, then attention over a cache."""
    for name, shape in (_TINY if settings.tiny else SHAPES).items():
        for kernel in _KERNELS[jax.default_backend()]:
            run = functools.partial(_training, settings, shape, kernel)
            yield f"{name}, {kernel}", run
        yield f"{name}, cache", functools.partial(_decoding, settings, shape)


def _training(settings: JobSettings, shape: Shape, kernel: str) -> Row:
    """Forward and backward of packed rows."""
    arrays, ids = _inputs(shape)

    def candidate(queries: Array, keys: Array, values: Array) -> Array:
        if kernel == "fused":
            return fused(queries, keys, values, ids, "xla")
        return Segments(ids).attend(queries, keys, values, kernel)

    def reference(queries: Array, keys: Array, values: Array) -> Array:
        return attention(queries, keys, values, causal_mask(ids))

    rounded = tuple(jnp.asarray(x, settings.dtype) for x in arrays)
    run = _with_gradients(candidate)
    outputs = jax.device_get(run(rounded))
    with jax.default_matmul_precision("highest"):
        exact = _with_gradients(reference)(
            tuple(x.astype(jnp.float32) for x in rounded)
        )
        wanted = jax.device_get(exact)
    names = ("output", "queries", "keys", "values")
    errors = {
        name: _error(got, want)
        for name, got, want in zip(names, outputs, wanted, strict=True)
    }
    return {
        "shape": dataclasses.asdict(shape),
        "dtype": settings.dtype,
        "errors": errors,
        "passed": max(errors.values()) < TOLERANCE,
        "ms_forward_backward": _milliseconds(lambda: run(rounded), settings.rounds),
    }


def _inputs(shape: Shape) -> tuple[tuple[np.ndarray, ...], Array]:
    """Queries, keys, values, and two packed documents and padding in every row."""
    draw = np.random.default_rng(0)
    size = shape.rows, shape.length
    queries = draw.standard_normal((*size, shape.heads, shape.width), np.float32)
    keys, values = (
        draw.standard_normal((*size, shape.kv_heads, shape.width), np.float32)
        for _ in range(2)
    )
    ids = np.ones(size, np.int32)
    ids[:, shape.length // 2 :] = 2
    ids[:, shape.length - shape.length // 8 :] = 0
    return (queries, keys, values), jnp.asarray(ids)


def _with_gradients(run: Callable[..., Array]) -> Callable[[Any], tuple[Array, ...]]:
    """The output, and the gradients of a fixed weighted sum of it."""

    def loss(arrays: Any) -> tuple[Array, Array]:
        mixed = run(*arrays)
        weights = jax.random.normal(jax.random.key(1), mixed.shape)
        return (mixed.astype(jnp.float32) * weights).sum(), mixed

    def both(arrays: Any) -> tuple[Array, ...]:
        (_, mixed), by = jax.value_and_grad(loss, has_aux=True)(arrays)
        return (mixed, *by)

    return jax.jit(both)


def _error(actual: Array, wanted: Array) -> float:
    """The largest difference relative to the largest value; infinite if one is NaN."""
    actual, wanted = np.asarray(actual, np.float32), np.asarray(wanted, np.float32)
    if not np.isfinite(actual).all():
        return float("inf")
    return float(np.abs(actual - wanted).max() / np.abs(wanted).max())


def _milliseconds(run: Callable[[], object], rounds: int) -> float:
    return 1e3 * statistics.median(seconds_of(run, rounds))


def _decoding(settings: JobSettings, shape: Shape) -> Row:
    """Attention of at most 32 draft tokens over a cache of various lengths."""
    arrays, _ = _inputs(shape)
    nodes = min(32, shape.length // 4)
    lengths = np.arange(1, shape.rows + 1) * (shape.length // (shape.rows + 1))
    rounded = [x.astype(settings.dtype) for x in arrays]
    new = [x[:, :nodes] for x in rounded]
    mask = np.tril(np.ones((shape.rows, nodes, nodes), bool))
    # The layout of the cache: see `KVCache`.
    prefix = rounded[1].transpose(0, 2, 3, 1), rounded[2].transpose(0, 2, 1, 3)
    positions = lengths[:, None] + np.arange(nodes)
    # Arguments, because XLA computes products of constants while it compiles.
    inputs = jax.device_put((new, prefix, mask, positions))

    @jax.jit
    def attend(
        visible: Array, new: Any, prefix: Any, mask: Array, positions: Array
    ) -> Array:
        read = functools.partial(
            prefix_attention,
            keys=prefix[0],
            values=prefix[1],
            visible=visible,
            positions=positions,
        )
        return attention(*new, mask, read)

    def run(visible: Array) -> Array:
        return attend(visible, *inputs)

    output = run(lengths)
    # The same with the cache before the new keys, and one softmax over all.
    old = np.arange(shape.length) < lengths[:, None, None]
    old = np.broadcast_to(old, (*mask.shape[:2], shape.length))
    seen = np.concatenate([old, mask], axis=-1)
    again = (np.concatenate([x, x[:, :nodes]], axis=1) for x in rounded[1:])
    whole = (x.astype(np.float32) for x in (rounded[0][:, :nodes], *again))
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(attention)(*whole, seen)
    error = _error(jax.device_get(output), jax.device_get(wanted))
    return {
        "shape": dataclasses.asdict(shape),
        "nodes": nodes,
        "dtype": settings.dtype,
        "errors": {"output": error},
        "passed": error < TOLERANCE,
        "ms_forward": _milliseconds(lambda: run(lengths), settings.rounds),
        "ms_forward_all_slots": _milliseconds(lambda: run(old), settings.rounds),
    }
