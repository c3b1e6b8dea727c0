"""Products of activations with parameters: arrays, and matrices stored otherwise.

A matrix unit multiplies bfloat16 numbers and adds in float32. TPUs and GPUs do so in
any case. On a CPU, XLA does so only if the result is asked for in float32; otherwise a
product in bfloat16 takes longer than one in float32.

Decoding uses this for parameters that are stored in bfloat16; training enables it with
`float32_sums`, whose products have a custom gradient: differentiating a product
with a float32 result gives products of float32 with bfloat16, which are slow again.
Products on any other device are not changed.
"""

import abc
import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

from bpd_jax.base.typing import AnyArray, Array, Float, Int
from bpd_jax.models.device_ops import on_cpu
from bpd_jax.models.stacks import InStack

SOFTMAX = "softmax_for_decoding"
"""The name of the matrix of the softmax `[V, D]` for `logits`, if a device has one. The
embedding, which may be the same matrix, keeps its name and dtype."""

_FLOAT32_SUMS = contextvars.ContextVar("float32_sums", default=False)


class StoredMatrix(abc.ABC):
    """A matrix `[O, I]` that is not stored as an array of its shape; a pytree.

    It stands for an array in products and lookups, which need not know how it is
    stored.
    """

    rounds_operands = False
    """Whether products round the other operand to 8 bits."""

    is_quantized = True
    """Whether numbers are in blocks of integers with a scale."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """O and I."""

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @abc.abstractmethod
    def times(self, x: Float[Array, "... I"], dtype: str) -> Float[Array, "... O"]:
        """Products with all rows, in float32 or `dtype`, that of activations."""

    @abc.abstractmethod
    def rows(self, ids: Any) -> Any:
        """The matrix of some rows: `[n]` ids, and of some kinds a slice.

        It is stored in a similar way; of floating-point numbers it is an array.
        """

    @abc.abstractmethod
    def values(self, dtype: str = "float32") -> Float[Array, "O I"]:
        """The matrix as an array."""

    def __getitem__(self, ids: Int[AnyArray, "..."] | slice) -> Float[Array, "... I"]:
        """The values of some rows."""
        if isinstance(ids, slice):
            return self.rows(ids).values()
        ids = jnp.asarray(ids)
        return self.rows(ids.ravel()).values().reshape(*ids.shape, -1)


@flax.struct.dataclass
class Packed:
    """A kernel of a projection, stored as `[O, I]`: each of O and I is one axis.

    It is one of decoding: nothing differentiates its products. Devices that multiply
    with kernels of their own have a subclass.

    Attributes:
      rows: an array `[O, I]` or a `StoredMatrix`: the numbers that are summed lie side
        by side.
      shape: static, that of the kernel.
    """

    rows: Any
    shape: tuple[int, ...] = flax.struct.field(pytree_node=False)

    def times(self, x: Float[Array, "... I"], dtype: str) -> Float[Array, "... O"]:
        """Products of x, each of whose rows has all numbers that are summed."""
        return times_rows(x, self.rows, dtype)

    def of_layer(self, number: int | Int[Array, ""]) -> "Packed":
        """The kernel of one layer, if `rows` has those of all layers in a stack."""
        return dataclasses.replace(self, rows=InStack(self.rows, number))


def is_stored(leaf: Any) -> bool:
    """Whether a parameter is a `StoredMatrix`; for `is_leaf`."""
    return isinstance(leaf, StoredMatrix)


def parameter(
    module: nn.Module,
    name: str,
    init: Callable[..., Array],
    shape: Sequence[int],
    dtype: str,
) -> Any:
    """A parameter of a module, or the stored matrix that stands for it."""
    stored = module.get_variable("params", name)
    if isinstance(stored, (Packed, StoredMatrix)):
        return stored
    return module.param(name, init, shape, dtype)


@jax.jit
def rows_of(matrix: AnyArray | StoredMatrix, ids: AnyArray) -> Any:
    """Some rows of a matrix, stored as the matrix is."""
    ids = jnp.asarray(ids)
    if isinstance(matrix, StoredMatrix):
        return matrix.rows(ids)
    return jnp.asarray(matrix)[ids]


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
        return kernel.times(x, dtype).astype(dtype)
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
    softmax: Float[Array, "V D"] | StoredMatrix,
    x: Float[Array, "... D"],
    dtype: str,
) -> Float[Array, "... V"]:
    """Products, float32, with the matrix for decoding in `params`, or `softmax`."""
    if SOFTMAX in params:
        return params[SOFTMAX].times(x, dtype).astype(jnp.float32)
    return times_rows(x, softmax, dtype).astype(jnp.float32)


def times_rows(x: Array, matrix: Array | StoredMatrix | InStack, dtype: str) -> Array:
    """`[..., D]` times `[O, D]`: `[..., O]`, in float32 where that is the accumulator.

    The matrix is cast to `dtype`.
    """
    if isinstance(matrix, InStack):
        # Imported late: only loops over stacked layers need it.
        from bpd_jax.models.quantized_kernel import gpu_product, reads

        rows = x.reshape(-1, x.shape[-1])
        if not reads(matrix, len(rows)):
            return times_rows(x, matrix.chosen(), dtype)
        total = gpu_product(rows.astype(dtype), matrix)
        return total.reshape(*x.shape[:-1], matrix.shape[0])
    if isinstance(matrix, StoredMatrix):
        return matrix.times(x, dtype)
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
