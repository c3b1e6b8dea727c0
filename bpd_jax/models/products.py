"""Products on a CPU: in bfloat16, and of the few rows that decoding multiplies.

A matrix unit multiplies bfloat16 numbers and adds in float32. TPUs and GPUs do so in
any case. On a CPU, XLA does so only if the result is asked for in float32; otherwise a
product in bfloat16 takes longer than one in float32. It is fastest where the numbers
that are summed lie side by side in both operands (`transposed_kernels`).

Decoding uses this for parameters that are stored in bfloat16; training enables it with
`float32_sums`, whose products have a custom gradient: differentiating a product
with a float32 result gives products of float32 with bfloat16, which are slow again.
Products on any other device are not changed.

Decoding in float32 multiplies few rows, by a kernel of our own (`row_kernel`). It reads
parameters in the layout of `decoding_layout`, whose names say that nothing
differentiates the product or spreads it over devices. The time of such a product is
that of reading the matrix, so matrices are stored in bfloat16 where that is allowed.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

from bpd_jax.base.typing import Array, Params
from bpd_jax.models import row_kernel

# Names that `decoding_layout` gives: a projection's kernel, transposed, and the matrix
# of the softmax.
TRANSPOSED = "kernel_transposed"
DECODING_SOFTMAX = "softmax_for_decoding"

_FLOAT32_SUMS = contextvars.ContextVar("float32_sums", default=False)


@contextlib.contextmanager
def float32_sums(enabled: bool = True) -> Iterator[None]:
    """Within it, `product` of bfloat16 operands adds in float32.

    It acts when a function is traced, so it belongs inside of jitted functions.
    """
    token = _FLOAT32_SUMS.set(enabled)
    try:
        yield
    finally:
        _FLOAT32_SUMS.reset(token)


def on_cpu(mesh: Mesh | None) -> bool:
    """Whether the devices are CPUs; without a mesh, whether the default one is."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return device.platform == "cpu"


def accumulator(x: Array, stored: Array) -> Any:
    """`preferred_element_type` of a product; None for the default.

    Args:
      x: activations.
      stored: a parameter in the dtype in which it is stored.
    """
    bfloat16 = x.dtype == jnp.bfloat16 and stored.dtype == jnp.bfloat16
    return jnp.float32 if bfloat16 and jax.default_backend() == "cpu" else None


def product(x: Array, kernel: Array, axes: int, dtype: str) -> Array:
    """`tensordot(x, kernel, axes)` in a precision.

    Args:
      x: `[..., I]`, where I stands for `axes` axes.
      kernel: `[I, O]`, as it is stored.
      axes: number of axes that are summed.
      dtype: to which the kernel is cast.
    """
    wider = accumulator(x, kernel)
    kernel = kernel.astype(dtype)
    if _FLOAT32_SUMS.get() and (x.dtype, kernel.dtype) == (jnp.bfloat16,) * 2:
        size = math.prod(kernel.shape[:axes])
        rows = _rows_times(x.reshape(-1, size), kernel.reshape(size, -1))
        return rows.reshape(*x.shape[: x.ndim - axes], *kernel.shape[axes:])
    total = jnp.tensordot(x, kernel, axes=axes, preferred_element_type=wider)
    return total if wider is None else total.astype(dtype)


def transposed_product(x: Array, kernel: Array, axes: int, dtype: str) -> Array:
    """`product` with a kernel `[O, I]`, each of O and I one axis: `[..., O]`."""
    x = x.reshape(*x.shape[: x.ndim - axes], -1)
    return decoding_product(x, kernel, dtype).astype(dtype)


def times_rows(x: Array, matrix: Array, dtype: str) -> Array:
    """`[..., D]` times `[O, D]`: `[..., O]`, in float32 where that is the accumulator.

    Args:
      x: activations.
      matrix: as it is stored.
      dtype: to which the matrix is cast.
    """
    wider = accumulator(x, matrix)
    matrix = matrix.astype(dtype)
    if wider is None:
        return jnp.einsum("...D,OD->...O", x, matrix)
    # With more axes XLA would first materialise the transposed matrix.
    rows = x.reshape(-1, x.shape[-1])
    sums = (((1,), (1,)), ((), ()))
    total = jax.lax.dot_general(rows, matrix, sums, preferred_element_type=wider)
    return total.reshape(*x.shape[:-1], matrix.shape[0])


def decoding_product(x: Array, matrix: Array, dtype: str) -> Array:
    """`times_rows` by the kernel for few rows, where there is one.

    It has no gradient, and XLA does not spread it over devices.
    """
    if not row_kernel.applies(x, matrix) or dtype != "float32":
        return times_rows(x, matrix, dtype)
    total = row_kernel.rows_times_matrix(x.reshape(-1, x.shape[-1]), matrix)
    return total.reshape(*x.shape[:-1], matrix.shape[0])


def decoding_layout(params: Params, *, exact: bool = True) -> Params:
    """The parameters of a trunk or block drafter as this device reads them fastest.

    On a CPU its projections are transposed (`transposed_kernels`), and the matrix of
    the softmax has a second name, under which `decoding_product` multiplies with it.
    Matrices in float32 become bfloat16 if all numbers of the matrix are representable
    in it, as those of checkpoints published in bfloat16. For other devices the
    parameters are returned as they are.

    Args:
      params: the parameters.
      exact: whether the results of products must stay the same, as those of a model.
        Otherwise all matrices are rounded to bfloat16, so that drafts may differ
        slightly.
    """
    if jax.default_backend() != "cpu":
        return params
    halve = functools.partial(_in_bfloat16, exact=exact)
    return with_decoding_softmax(transposed_kernels(params, halve), exact=exact)


def with_decoding_softmax(params: Params, *, exact: bool) -> Params:
    """Adds the matrix `[V, D]` of a softmax in the layout of `decoding_layout`."""
    softmax = jnp.asarray(params.get("softmax", params.get("embedding")))
    return {**params, DECODING_SOFTMAX: _in_bfloat16(softmax, exact)}


def _in_bfloat16(matrix: Array, exact: bool) -> Array:
    """The matrix in bfloat16, unless that would change numbers of an exact one.

    Matrices that the kernel cannot read stay in float32: XLA would convert them back.
    """
    tile = row_kernel.tile_of_processor()
    if matrix.dtype != jnp.float32 or tile is None or matrix.shape[-1] % tile.width:
        return matrix
    if exact:
        bits = np.asarray(matrix).view(np.uint32).ravel()
        low = np.uint32(0xFFFF)
        # Most matrices are decided by their first numbers.
        if (bits[:1024] & low).any() or (bits & low).any():
            return matrix
    return matrix.astype(jnp.bfloat16)


def transposed_kernels(
    params: Any, store: Callable[[Array], Array] = lambda matrix: matrix
) -> Any:
    """A trunk's parameters in which every `kernel` `[I, O]` is transposed.

    `kernel_transposed` `[O, I]` replaces it: a product of 64 rows with it takes half
    the time on a CPU. For decoding alone: nothing trains or saves such parameters.

    Args:
      params: the parameters.
      store: converts each transposed matrix.
    """

    def converted(tree: Any, name: str) -> Any:
        if not isinstance(tree, dict):
            return tree
        if "kernel" not in tree:
            return {key: converted(sub, key) for key, sub in tree.items()}
        kernel = tree["kernel"]
        # The output of attention sums over heads and over the features of each.
        summed = 2 if name.startswith("output") and kernel.ndim == 3 else 1
        matrix = kernel.reshape(math.prod(kernel.shape[:summed]), -1)
        rest = {key: value for key, value in tree.items() if key != "kernel"}
        return {**rest, TRANSPOSED: store(jnp.asarray(matrix.T))}

    return converted(params, "")


def cast_matrices(params: Params, dtype: str) -> Params:
    """Parameters whose floating-point matrices have another dtype."""

    def cast(leaf: Array) -> Array:
        matrix = leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if matrix else leaf

    return jax.tree.map(cast, params)


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
    if jax.default_backend() == "cpu":
        transposed = with_layout_constraint(transposed, Layout((0, 1)))
    return _wide_sum(transposed, y, ((1,), (0,)))


def _wide_sum(x: Array, y: Array, axes: tuple[tuple[int], tuple[int]]) -> Array:
    return jax.lax.dot_general(
        x, y, (axes, ((), ())), preferred_element_type=jnp.float32
    )


def _sum(x: Array, y: Array, axes: tuple[tuple[int], tuple[int]]) -> Array:
    return _wide_sum(x, y, axes).astype(x.dtype)
