"""A product of few rows with a large matrix on a CPU, which reads the matrix once.

Verifying a draft multiplies 2 to 32 rows with every matrix of the model. XLA first
rearranges the matrix for such a product, which takes about as long as the product;
this kernel reads the matrix as it lies in memory, and expands a quantized one in
registers. `benchmarks.row_products` compares the two.

Every number of the result is summed in the same order, however many rows there are: the
products of a token are the same bits in a pass over one token and in a pass over a
draft, and with a quantized matrix the same as with its values.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array
from bpd_jax.cpu.device import kernel_name
from bpd_jax.cpu.operands import OneOf, example, operands
from bpd_jax.cpu.tile import Storage, Tile, tile_of_processor
from bpd_jax.models.quantized import QuantizedMatrix

# Above this many rows XLA's products are as fast: with a matrix in float32, and with
# one in bfloat16, which XLA first converts to float32.
MOST_ROWS = {jnp.dtype("float32"): 192, jnp.dtype("bfloat16"): 512}
MOST_ROWS_QUANTIZED = 192

# Numbers in a block that the kernel can read.
_BLOCKS = (16, 32)


def applies(
    x: Array | jax.ShapeDtypeStruct, matrix: Array | QuantizedMatrix | OneOf
) -> bool:
    """Whether `rows_times_matrix` of `[..., K]` and `[O, K]` is faster than XLA."""
    if x.dtype != jnp.float32:
        return False
    tile = tile_of_processor()
    length, matrix = x.shape[-1], example(matrix)
    if tile is None or not length or length % tile.width:
        return False
    if isinstance(matrix, QuantizedMatrix):
        most = MOST_ROWS_QUANTIZED if matrix.block in _BLOCKS else 0
    else:
        most = MOST_ROWS.get(matrix.dtype, 0)
    return 0 < x.size // length <= most


def rows_times_matrix(
    x: Array, matrix: Array | QuantizedMatrix | OneOf, tile: Tile | None = None
) -> Array:
    """`x @ matrix.T` in float32, where `applies`.

    x is `[M, K]` float32, the matrix `[O, K]` float32, bfloat16 or quantized, the
    result `[M, O]`. The tile, whose width divides K, is by default that of this
    processor.
    """
    tile = tile or tile_of_processor()
    assert tile is not None
    result = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0]), jnp.float32)
    name = _register("product", tile, _storage(matrix))
    return jax.ffi.ffi_call(name, result)(x, *operands(matrix))


def expanded(matrix: QuantizedMatrix, tile: Tile | None = None) -> Array:
    """`matrix.values()`, by all threads and in less time than XLA takes."""
    tile = tile or tile_of_processor()
    if tile is None or matrix.block not in _BLOCKS:
        return matrix.values()
    result = jax.ShapeDtypeStruct(matrix.shape, jnp.float32)
    name = _register("expansion", tile, _storage(matrix))
    return jax.ffi.ffi_call(name, result)(*operands(matrix))


def _storage(matrix: Array | QuantizedMatrix | OneOf) -> Storage:
    matrix = example(matrix)
    if isinstance(matrix, QuantizedMatrix):
        return Storage(matrix.bits, matrix.block, matrix.minima is not None)
    return Storage(8 * matrix.dtype.itemsize)


def _register(kind: str, tile: Tile, stored: Storage) -> str:
    """Registers a kernel with XLA, and returns its name there."""
    from bpd_jax.cpu.row_kernel_code import expansion_module, product_module
    from bpd_jax.cpu.xla_kernel import register

    build = {"product": product_module, "expansion": expansion_module}[kind]
    sizes = (*dataclasses.astuple(tile), *dataclasses.astuple(stored))
    name = kernel_name("rows", kind, *map(int, sizes))
    register(name, lambda: build(tile, stored))
    return name
