"""Products of bfloat16 matrices with sums in float32, forwards and backwards.

GPUs and TPUs add in float32 in any case. On a CPU, XLA uses the matrix unit only if the
result is asked for in float32, and differentiating such a product gives products of
float32 with bfloat16, which do not use it either. So the gradient is written out here:
both of its products have bfloat16 operands and float32 sums too.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from bpd_jax.typing import Array

_FLOAT32_SUMS = contextvars.ContextVar("float32_sums", default=False)


@contextlib.contextmanager
def float32_sums() -> Iterator[None]:
    """Within it, `product` of bfloat16 operands adds in float32.

    It acts when a function is traced, so it belongs inside of jitted functions.
    """
    token = _FLOAT32_SUMS.set(True)
    try:
        yield
    finally:
        _FLOAT32_SUMS.reset(token)


def product(x: Array, kernel: Array, axes: int) -> Array:
    """`tensordot(x, kernel, axes)`, in the dtype of both operands.

    Args:
      x: `[..., I]`, where I stands for `axes` axes.
      kernel: `[I, O]`.
      axes: how many axes are summed.
    """
    if not _FLOAT32_SUMS.get() or (x.dtype, kernel.dtype) != (jnp.bfloat16,) * 2:
        return jnp.tensordot(x, kernel, axes=axes)
    size = math.prod(kernel.shape[:axes])
    found = _rows_times(x.reshape(-1, size), kernel.reshape(size, -1))
    return found.reshape(*x.shape[: x.ndim - axes], *kernel.shape[axes:])


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
        _sum(rows, gradient, ((0,), (0,))),
    )


_rows_times.defvjp(_forward, _backward)


def _sum(x: Array, y: Array, axes: tuple[tuple[int], tuple[int]]) -> Array:
    total = jax.lax.dot_general(
        x, y, (axes, ((), ())), preferred_element_type=jnp.float32
    )
    return total.astype(x.dtype)
