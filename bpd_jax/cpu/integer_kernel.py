"""Products of integers on a CPU: activations and matrices in 8 bits or less.

A row of activations is rounded to 8 bits in the blocks of the matrix. Integers are
multiplied and added four at a time by one instruction, exactly, and the sum of a block
is scaled in float32. Every number of the result is summed in the same order, however
many rows there are.

The matrix is arranged once so that the numbers of W outputs lie side by side, where W
is the width of a vector: no sum runs over a vector, and numbers of 4 bits are unpacked
once for all rows.
"""

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import Array, Float
from bpd_jax.cpu.device import kernel_name
from bpd_jax.cpu.tile import ARM, processor_features
from bpd_jax.models.quantized import (
    OneOf,
    QuantizedMatrix,
    TiledMatrix,
    example,
    operands,
)

# Numbers in a block that the kernel can read.
BLOCKS = (16, 32)


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
