"""Products in float32 on a CPU, with a matrix stored in 32, 16, 8 or 4 bits.

Numbers of a stored matrix are expanded in registers, once for up to nine rows; more
rows are multiplied with numbers that are expanded in the cache. Every number of the
result is the sum of products in the order of K, however many rows there are: the
products of a token are the same bits in a pass over one token and in a pass over a
draft, and with a quantized matrix the same as with its values.
`benchmarks.row_products` measures them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float
from bpd_jax.cpu.device import kernel_name
from bpd_jax.cpu.operands import example, operands


def float_rows(x: Float[Array, "M I"], tiles: Any) -> Float[Array, "M P"]:
    """`x @ tiles.T` in float32, of a `TiledMatrix` or a `OneOf`.

    P is O, rounded up to whole vectors of the kernel.
    """
    from bpd_jax.cpu.float_kernel_code import float_module
    from bpd_jax.cpu.xla_kernel import register

    matrix = example(tiles)
    groups, *_, width = matrix.words.shape
    name = kernel_name(
        "float_rows", width, *map(int, dataclasses.astuple(matrix.storage))
    )
    register(name, lambda: float_module(width, matrix.storage))
    result = jax.ShapeDtypeStruct((x.shape[0], groups * width), jnp.float32)
    product: Array = jax.ffi.ffi_call(name, result)(x, *operands(tiles))
    return product
