"""Products of integers on a CPU: activations and matrices in 8 bits or less.

A row of activations is rounded to 8 bits in the blocks of the matrix. Integers are
multiplied and added four at a time by one instruction, exactly, and the sum of a block
is scaled in float32. Every number of the result is summed in the same order, however
many rows there are.

The matrix is arranged once so that the numbers of W outputs lie side by side, where W
is the width of a vector: no sum runs over a vector, and numbers of 4 bits are unpacked
once for all rows.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.cpu.device import kernel_name
from bpd_jax.cpu.operands import OneOf, example, operands
from bpd_jax.cpu.tile import ARM, processor_features
from bpd_jax.models.products import StoredMatrix
from bpd_jax.models.quantized import QuantizedMatrix

# Numbers in a block that the kernel can read.
BLOCKS = (16, 32)


@flax.struct.dataclass
class TiledMatrix(StoredMatrix):
    """A quantized matrix `[O, I]` as integer products on a CPU read it.

    Attributes:
      words: uint32 `[G, n, words, W]`: of W outputs and a block the unsigned integers,
        four to a word or, of 4 bits, eight; then float32 scales and minima.
      sizes: O and I; static, as are the others.
      bits: 4 or 8.
      block: numbers of a block.
      offset: what is subtracted from the unsigned integers: 0 or 128.
      minima: whether blocks have minima.
    """

    words: Any
    sizes: tuple[int, int] = flax.struct.field(pytree_node=False)
    bits: int = flax.struct.field(pytree_node=False)
    block: int = flax.struct.field(pytree_node=False)
    offset: int = flax.struct.field(pytree_node=False)
    minima: bool = flax.struct.field(pytree_node=False)

    rounds_operands = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.sizes

    def times(self, x: Float[Array, "... I"], dtype: str) -> Float[Array, "... O"]:
        total = integer_rows(x.reshape(-1, x.shape[-1]).astype(jnp.float32), self)
        return total.reshape(*x.shape[:-1], self.shape[0])

    def values(self, dtype: str = "float32") -> Float[Array, "O I"]:
        return self.rows(jnp.arange(self.shape[0])).values(dtype)

    def rows(self, ids: Int[Array, " n"]) -> QuantizedMatrix:
        """The matrix of some rows."""
        width = self.words.shape[-1]
        words = self.words[ids // width, :, :, ids % width]
        size = self.block * self.bits // 32
        integers, scales, minima = jnp.split(words, [size, size + 1], axis=2)
        integers = jax.lax.bitcast_convert_type(integers, jnp.uint8)
        if self.bits == 8:
            integers = (integers ^ np.uint8(self.offset)).astype(jnp.int8)

        def floats(part: Array) -> Array:
            return jax.lax.bitcast_convert_type(part[..., 0], jnp.float32)

        return QuantizedMatrix(
            integers.reshape(len(words), -1),
            floats(scales),
            floats(minima) if self.minima else None,
        )


def lanes() -> int | None:
    """W for this processor, up to the limit of `XLA_FLAGS`.

    None if it lacks the instructions, or LLVM.
    """
    try:
        # LLVM is imported late: other devices do not need it.
        features = processor_features()
    except ImportError:
        return None
    if features.get("dotprod"):
        return ARM
    if features.get("avx512f") and features.get("avx512vnni"):
        return 16
    return 8 if features.get("avx2") and features.get("fma") else None


def tiled(matrix: QuantizedMatrix, width: int | None = None) -> TiledMatrix:
    """A matrix in blocks of 16 or 32 numbers as the kernel reads it; `width` is W."""
    width = width or lanes()
    assert width is not None
    assert matrix.block in BLOCKS
    offset = 0
    integers = np.asarray(matrix.integers)
    # ARM multiplies signed integers with signed ones.
    if matrix.bits == 8 and width != ARM and (integers < 0).any():
        integers, offset = integers.view(np.uint8) ^ np.uint8(128), 128
    outputs, blocks = matrix.scales.shape
    groups = -(-outputs // width)
    parts = [integers.view(np.uint32), np.asarray(matrix.scales).view(np.uint32)]
    if matrix.minima is not None:
        parts.append(np.asarray(matrix.minima).view(np.uint32))
    sizes = [part.shape[1] // blocks for part in parts]
    words = np.zeros((groups, blocks, sum(sizes), width), np.uint32)
    # Groups are written one after the other, so that all that is read stays near.
    place = 0
    for part, size in zip(parts, sizes, strict=True):
        rows = part.reshape(outputs, blocks, size)
        for group in range(groups):
            some = rows[group * width : (group + 1) * width]
            to = words[group, :, place : place + size, : len(some)]
            to[...] = some.transpose(1, 2, 0)
        place += size
    return TiledMatrix(
        jax.device_put(words),
        (outputs, matrix.shape[1]),
        matrix.bits,
        matrix.block,
        offset,
        matrix.minima is not None,
    )


def integer_rows(
    x: Float[Array, "M I"], tiles: TiledMatrix | OneOf
) -> Float[Array, "M O"]:
    """`x @ tiles.T`, where x is rounded to 8 bits too."""
    from bpd_jax.cpu.integer_kernel_code import integer_module, words_of_block
    from bpd_jax.cpu.xla_kernel import register

    matrix: TiledMatrix = example(tiles)
    rows, width = x.shape[0], matrix.words.shape[-1]
    sizes = (width, matrix.bits, matrix.block, matrix.offset, int(matrix.minima))
    name = kernel_name("integer_rows", *sizes)
    register(name, lambda: integer_module(*sizes))
    result = jax.ShapeDtypeStruct((rows, matrix.shape[0]), jnp.float32)
    # The rounded rows.
    words = matrix.words.shape[1] * words_of_block(matrix.block)
    scratch = jax.ShapeDtypeStruct((rows, words), jnp.int32)
    call = jax.ffi.ffi_call(name, (result, scratch))
    product: Array = call(x, *operands(tiles))[0]
    return product
