"""Matrices whose numbers stay quantized: small integers with a scale per block.

A row of a matrix `[O, I]` is split into blocks, whose numbers are

    value = scale · integer + minimum

Products read the integers and expand them where they multiply: in registers on a GPU
(`quantized_kernel`) and by the kernels of a CPU, elsewhere as XLA compiles it. The
values are those of the expanded matrix: float32, rounded once.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from bpd_jax.base.typing import AnyArray, Array, Float, Params
from bpd_jax.models.products import Packed, StoredMatrix, times_rows
from bpd_jax.models.quantized_kernel import CHUNK, MOST_ROWS, gpu_product

# Numbers in a block of packed integers: byte j holds number j in its low half and
# number j + 16 in its high half.
PACKED_BLOCK = 32

# Numbers in a block of `quantize`.
_BLOCK = 32


@flax.struct.dataclass
class QuantizedMatrix(StoredMatrix):
    """A matrix `[O, I]` in blocks of I / n numbers of a row, whose arrays may be numpy.

    Attributes:
      integers: int8 `[O, I]`; or uint8 `[O, I/2]`, two numbers of 0 to 15 in a byte, in
        blocks of `PACKED_BLOCK`.
      scales: float32 `[O, n]`.
      minima: float32 `[O, n]`; None for zeros.
      in_kernel: whether `quantized_kernel` multiplies few rows with it. Static.

    In the stack of a loop over layers (`InStack`) all arrays have one more axis.
    """

    integers: Any
    scales: Any
    minima: Any = None
    in_kernel: bool = flax.struct.field(pytree_node=False, default=False)

    def __repr__(self) -> str:
        rows, length = self.shape
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(self)) / 1e6
        return (
            f"QuantizedMatrix({rows} × {length}, {self.bits} bits in blocks of "
            f"{self.block}, {size:.1f} MB)"
        )

    @property
    def bits(self) -> int:
        """Bits of an integer: 4 or 8."""
        return 4 if self.integers.dtype == np.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """O and I."""
        rows, size = self.integers.shape[-2:]
        return rows, size * 8 // self.bits

    def __len__(self) -> int:
        return len(self.integers)

    @property
    def by_output(self) -> bool:
        """Whether an output has one scale, by which its sum may be multiplied."""
        whole = self.scales.shape[-1] == 1 and self.block > _BLOCK
        return whole and self.minima is None and self.bits == 8

    @property
    def block(self) -> int:
        """Numbers of a block."""
        return self.shape[1] // self.scales.shape[-1]

    def values(self, dtype: str = "float32") -> Float[Array, "O I"]:
        """The expanded matrix; of numpy arrays a numpy array."""
        integers = self.integers
        if self.bits == 4:
            bytes_ = integers.reshape(len(integers), -1, 1, PACKED_BLOCK // 2)
            integers = bytes_ >> np.array([[0], [4]], np.uint8) & np.uint8(15)
        blocks = integers.reshape(*self.scales.shape, self.block).astype("float32")
        blocks = blocks * self.scales[..., None]
        if self.minima is not None:
            blocks = blocks + self.minima[..., None]
        values: Array = blocks.reshape(self.shape).astype(dtype)
        return values

    def rows(self, ids: AnyArray | slice) -> "QuantizedMatrix":
        """The matrix of some rows: a slice, or `[n]` ids."""
        return jax.tree.map(lambda array: array[ids], self)

    def times(self, x: Float[Array, "... I"], dtype: str) -> Float[Array, "... O"]:
        if self.by_output:
            # XLA converts the integers where it multiplies them.
            integers = self.integers.astype(dtype)
            wide = jnp.einsum(
                "...D,OD->...O", x, integers, preferred_element_type=jnp.float32
            )
            return wide * self.scales[:, 0]
        rows = x.reshape(-1, x.shape[-1])
        if self.in_kernel and len(rows) <= MOST_ROWS:
            total = gpu_product(rows.astype(dtype), self)
            return total.reshape(*x.shape[:-1], self.shape[0])
        return times_rows(x, self.values(dtype), dtype)

    def placed(self, sharding: Sharding, summed: int) -> "QuantizedMatrix":
        """The matrix on the devices that share the parameter for which it stands.

        An axis that is not divided evenly, I in whole blocks, is replicated.

        Args:
          sharding: that of the parameter.
          summed: number of its first axes that are I; 0 if the parameter is `[O, I]`.
        """
        if isinstance(sharding, NamedSharding):
            mesh, spec, axes = sharding.mesh, tuple(sharding.spec), []
            parts = (spec[summed:], spec[:summed]) if summed else (spec[:1], spec[1:])
            # A scale for the whole of I is replicated; otherwise no array has fewer
            # elements along an axis than the scales.
            sizes = self.integers.shape if self.by_output else self.scales.shape
            for size, names in zip(sizes, parts, strict=True):
                axis = next((name for name in names if isinstance(name, str)), None)
                uneven = axis is not None and size % mesh.shape[axis]
                axes.append(None if uneven else axis)
            sharding = NamedSharding(mesh, PartitionSpec(*axes))
            if self.by_output:
                scales = jax.device_put(
                    self.scales, NamedSharding(mesh, PartitionSpec(axes[0], None))
                )
                integers = jax.device_put(self.integers, sharding)
                return dataclasses.replace(self, integers=integers, scales=scales)
        result: QuantizedMatrix = jax.device_put(self, sharding)
        return result


def is_quantized(leaf: Any) -> bool:
    """Whether a parameter is a `QuantizedMatrix`; for `is_leaf`."""
    return isinstance(leaf, QuantizedMatrix)


def expanded(params: Params) -> Params:
    """Parameters with the values of quantized matrices; packed kernels stay so."""

    def expand(leaf: Any) -> Any:
        return leaf.values() if is_quantized(leaf) else leaf

    return jax.tree.map(expand, params, is_leaf=is_quantized)


def in_kernel(params: Params) -> Params:
    """Parameters whose matrices in blocks are multiplied by `gpu_product`."""

    def marked(leaf: Any) -> Any:
        if not is_quantized(leaf) or CHUNK % (leaf.block * leaf.bits // 8):
            return leaf
        return dataclasses.replace(leaf, in_kernel=True)

    return jax.tree.map(marked, params, is_leaf=is_quantized)


def pack(integers: np.ndarray) -> np.ndarray:
    """Numbers of 0 to 15, `[O, I]`, as `QuantizedMatrix.integers` of 4 bits, uint8."""
    low, high = np.split(
        integers.reshape(len(integers), -1, 2, PACKED_BLOCK // 2), 2, 2
    )
    return (low | high << 4).astype(np.uint8).reshape(len(integers), -1)


def quantize(matrix: AnyArray, block: int = _BLOCK) -> QuantizedMatrix:
    """Rounds a matrix `[O, I]` to 8 bits in blocks that divide I, on the host."""
    blocks = np.asarray(matrix, np.float32).reshape(len(matrix), -1, block)
    scales = np.abs(blocks).max(-1) / np.float32(127)
    divisors = np.where(scales == 0, np.float32(1), scales)[..., None]
    integers = np.rint(blocks / divisors).astype(np.int8, order="C")
    integers = integers.reshape(matrix.shape)
    return QuantizedMatrix(integers, scales)


def summed_axes(name: str, shape: Sequence[int]) -> int:
    """The number of axes that a kernel sums over, from the name of its module."""
    # The output of attention sums over heads and over the features of each.
    return 2 if name.startswith("output") and len(shape) == 3 else 1


def kernel_rows(name: str, kernel: Any) -> Any:
    """`Packed.rows` of a kernel, from the name of its module."""
    summed = summed_axes(name, kernel.shape)
    return kernel.reshape(math.prod(kernel.shape[:summed]), -1).T


def rounded(params: Params, *, by_output: bool = False) -> tuple[Params, float]:
    """Parameters of a trunk whose matrices are rounded to 8 bits, for decoding.

    Matrices that are quantized, or whose rows cannot be split into blocks, stay.

    Args:
      by_output: whether all numbers of an output have one scale instead of blocks: less
        precise, but XLA multiplies such matrices without expanding them in memory.

    Returns:
      The parameters, and the relative error: the root mean square of the change of
      rounded numbers, divided by that of the numbers.
    """
    squares = [0.0, 0.0]

    def quantized(matrix: AnyArray, leaf: Array, summed: int) -> QuantizedMatrix:
        result = quantize(matrix, matrix.shape[-1] if by_output else _BLOCK)
        for number, part in enumerate((result.values() - matrix, matrix)):
            squares[number] += float(np.square(part, dtype=np.float64).sum())
        return result.placed(leaf.sharding, summed)

    def visit(tree: Any, name: str) -> Any:
        if isinstance(tree, dict):
            return {
                key: packed(value, name) if key == "kernel" else visit(value, key)
                for key, value in tree.items()
            }
        table = name in ("embedding", "softmax") and not is_quantized(tree)
        if not table or not fits(tree):
            return tree
        return quantized(np.asarray(tree), tree, summed=0)

    def packed(kernel: Any, name: str) -> Any:
        if isinstance(kernel, Packed):
            return kernel
        rows = np.asarray(kernel_rows(name, kernel))
        if not fits(rows):
            return kernel
        summed = summed_axes(name, kernel.shape)
        return Packed(quantized(rows, kernel, summed), kernel.shape)

    def fits(matrix: AnyArray) -> bool:
        return by_output or matrix.shape[-1] % _BLOCK == 0

    result = visit(params, "")
    return result, math.sqrt(squares[0] / max(squares[1], 1e-30))
