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

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float
from bpd_jax.cpu.device import kernel_name
from bpd_jax.cpu.operands import example, operands
from bpd_jax.cpu.tile import ARM, processor_features


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


def integer_rows(x: Float[Array, "M I"], tiles: Any) -> Float[Array, "M O"]:
    """`x @ tiles.T` of a `TiledMatrix` or a `OneOf`; x is rounded to 8 bits too."""
    from bpd_jax.cpu.integer_kernel_code import integer_module, words_of_block
    from bpd_jax.cpu.xla_kernel import register

    matrix = example(tiles)
    rows, width = x.shape[0], matrix.words.shape[-1]
    stored = matrix.storage
    sizes = (width, stored.bits, stored.block, stored.offset, int(stored.minima))
    name = kernel_name("integers", *sizes)
    register(name, lambda: integer_module(*sizes))
    result = jax.ShapeDtypeStruct((rows, matrix.shape[0]), jnp.float32)
    # The rounded rows.
    words = matrix.words.shape[1] * words_of_block(*sizes[:3])
    scratch = jax.ShapeDtypeStruct((rows, words), jnp.int32)
    call = jax.ffi.ffi_call(name, (result, scratch))
    product: Array = call(x, *operands(tiles))[0]
    return product
