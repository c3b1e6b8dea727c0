"""Products: on a CPU in bfloat16 and of few rows; everywhere with quantized matrices.

A matrix unit multiplies bfloat16 numbers and adds in float32. TPUs and GPUs do so in
any case. On a CPU, XLA does so only if the result is asked for in float32; otherwise a
product in bfloat16 takes longer than one in float32.

Decoding uses this for parameters that are stored in bfloat16; training enables it with
`float32_sums`, whose products have a custom gradient: differentiating a product
with a float32 result gives products of float32 with bfloat16, which are slow again.
Products on any other device are not changed.

Decoding in float32 multiplies few rows, by a kernel of our own (`row_kernel`).
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Float
from bpd_jax.cpu.device import on_cpu
from bpd_jax.cpu.integer_kernel import integer_rows
from bpd_jax.cpu.layout import SOFTMAX
from bpd_jax.cpu.row_kernel import applies, expanded, rows_times_matrix
from bpd_jax.models.quantized import (
    Packed,
    QuantizedMatrix,
    TiledMatrix,
    example,
)
from bpd_jax.models.quantized_kernel import MOST_ROWS, gpu_product

_FLOAT32_SUMS = contextvars.ContextVar("float32_sums", default=False)


@contextlib.contextmanager
def float32_sums(mesh: Mesh | None = None) -> Iterator[None]:
    """Within it, `product` of bfloat16 operands adds in float32 on a CPU.

    It acts when a function is traced, so it belongs inside of jitted functions.
    """
    token = _FLOAT32_SUMS.set(on_cpu(mesh))
    try:
        yield
    finally:
        _FLOAT32_SUMS.reset(token)


def product(x: Array, kernel: Array | Packed, axes: int, dtype: str) -> Array:
    """`tensordot(x, kernel, axes)` in a precision.

    x is `[..., I]`, where I stands for `axes` axes, and the kernel `[I, O]`, which is
    cast to `dtype`; the result of a packed one has O as one axis.
    """
    if isinstance(kernel, Packed):
        x = x.reshape(*x.shape[: x.ndim - axes], -1)
        return times_packed(x, kernel.rows, dtype).astype(dtype)
    wider = _accumulator(x, kernel)
    kernel = kernel.astype(dtype)
    if _FLOAT32_SUMS.get() and (x.dtype, kernel.dtype) == (jnp.bfloat16,) * 2:
        size = math.prod(kernel.shape[:axes])
        rows = _rows_times(x.reshape(-1, size), kernel.reshape(size, -1))
        return rows.reshape(*x.shape[: x.ndim - axes], *kernel.shape[axes:])
    total = jnp.tensordot(x, kernel, axes=axes, preferred_element_type=wider)
    return total if wider is None else total.astype(dtype)


def logits(
    params: Mapping[str, Any],
    softmax: Float[Array, "V D"] | QuantizedMatrix | TiledMatrix,
    x: Float[Array, "... D"],
    dtype: str,
) -> Float[Array, "... V"]:
    """Products, float32, with the matrix for decoding in `params`, or `softmax`."""
    if SOFTMAX in params:
        return times_packed(x, params[SOFTMAX].rows, dtype).astype(jnp.float32)
    assert not isinstance(softmax, TiledMatrix)
    return times_rows(x, softmax, dtype).astype(jnp.float32)


def times_packed(x: Array, rows: Any, dtype: str) -> Array:
    """`times_rows` by the kernels for decoding, where there are any.

    They have no gradient, and XLA does not spread them over devices.
    """
    if isinstance(example(rows), TiledMatrix):
        total = integer_rows(x.reshape(-1, x.shape[-1]).astype(jnp.float32), rows)
        return total.reshape(*x.shape[:-1], rows.shape[0])
    if not applies(x, rows) or dtype != "float32":
        return times_rows(x, rows, dtype)
    total = rows_times_matrix(x.reshape(-1, x.shape[-1]), rows)
    return total.reshape(*x.shape[:-1], rows.shape[0])


def times_rows(x: Array, matrix: Array | QuantizedMatrix, dtype: str) -> Array:
    """`[..., D]` times `[O, D]`: `[..., O]`, in float32 where that is the accumulator.

    The matrix is cast to `dtype`.
    """
    if isinstance(matrix, QuantizedMatrix):
        if matrix.by_output:
            # XLA converts the integers where it multiplies them.
            integers = matrix.integers.astype(dtype)
            wide = jnp.einsum(
                "...D,OD->...O", x, integers, preferred_element_type=jnp.float32
            )
            return wide * matrix.scales[:, 0]
        rows = x.reshape(-1, x.shape[-1])
        if matrix.in_kernel and len(rows) <= MOST_ROWS:
            total = gpu_product(rows.astype(dtype), matrix)
            return total.reshape(*x.shape[:-1], matrix.shape[0])
        matrix = expanded(matrix).astype(dtype)
    wider = _accumulator(x, matrix)
    matrix = matrix.astype(dtype)
    if wider is None:
        return jnp.einsum("...D,OD->...O", x, matrix)
    # With more axes XLA would first materialise the transposed matrix.
    rows = x.reshape(-1, x.shape[-1])
    sums = (((1,), (1,)), ((), ()))
    total = jax.lax.dot_general(rows, matrix, sums, preferred_element_type=wider)
    return total.reshape(*x.shape[:-1], matrix.shape[0])


def _accumulator(x: Array, stored: Array) -> Any:
    """`preferred_element_type` of a product with a stored matrix; None: the default."""
    bfloat16 = x.dtype == jnp.bfloat16 and stored.dtype == jnp.bfloat16
    return jnp.float32 if bfloat16 and on_cpu() else None


@jax.custom_vjp
def _rows_times(rows: Array, matrix: Array) -> Array:
    """`rows @ matrix` of two matrices in bfloat16."""
    return _sum(rows, matrix, ((1,), (0,)))


def _forward(rows: Array, matrix: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rows_times(rows, matrix), (rows, matrix)


def _backward(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    rows, matrix = operands
    return (
        _sum(gradient, matrix, ((1,), (1,))),
        summed_rows(rows, gradient).astype(rows.dtype),
    )


_rows_times.defvjp(_forward, _backward)


def summed_rows(x: Array, y: Array) -> Array:
    """`x.T @ y` of `[n, A]` and `[n, B]`, `[A, B]` in float32; x is the smaller one.

    On a CPU x.T is materialised: folded into the product, it takes longer.
    """
    transposed = x.T
    if on_cpu():
        transposed = with_layout_constraint(transposed, Layout((0, 1)))
    return _wide_sum(transposed, y, ((1,), (0,)))


def in_order(x: Array) -> Array:
    """x with its axes in order in memory, so that XLA does not copy it for each slice.

    A gather has them in another order, and layers would each have a copy of all.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if on_cpu() else x


def _wide_sum(x: Array, y: Array, axes: tuple[tuple[int], tuple[int]]) -> Array:
    return jax.lax.dot_general(
        x, y, (axes, ((), ())), preferred_element_type=jnp.float32
    )


def _sum(x: Array, y: Array, axes: tuple[tuple[int], tuple[int]]) -> Array:
    return _wide_sum(x, y, axes).astype(x.dtype)
