"""A product of few rows with a large matrix on a CPU, which reads the matrix once.

Verifying a draft multiplies 2 to 32 rows with every matrix of the model. XLA first
rearranges the matrix for such a product, which takes about as long as the product;
this kernel reads the matrix as it lies in memory. `benchmarks.row_products` compares
the two.

Every number of the result is summed in the same order, however many rows there are: the
products of a token are the same bits in a pass over one token and in a pass over a
draft.
"""

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array
from bpd_jax.models.cpu.device import on_cpu
from bpd_jax.models.cpu.tile import Tile, tile_of_processor

# Above this many rows XLA's products are as fast: with a matrix in float32, and with
# one in bfloat16, which XLA first converts to float32.
MOST_ROWS = {jnp.dtype("float32"): 192, jnp.dtype("bfloat16"): 512}


def applies(x: Array, matrix: Array) -> bool:
    """Whether `rows_times_matrix` supports these arrays and is faster than XLA.

    Args:
      x: `[..., K]`.
      matrix: `[O, K]`.
    """
    if not on_cpu() or x.dtype != jnp.float32:
        return False
    tile = tile_of_processor()
    length = x.shape[-1]
    if tile is None or not length or length % tile.width:
        return False
    return 0 < x.size // length <= MOST_ROWS.get(matrix.dtype, 0)


def rows_times_matrix(x: Array, matrix: Array, tile: Tile | None = None) -> Array:
    """`x @ matrix.T` in float32, where `applies`.

    Args:
      x: `[M, K]` float32.
      matrix: `[O, K]` float32 or bfloat16.
      tile: whose width divides K; None for that of this processor.

    Returns:
      `[M, O]`.
    """
    tile = tile or tile_of_processor()
    assert tile is not None
    result = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0]), jnp.float32)
    name = _register(tile, matrix.dtype == jnp.bfloat16)
    return jax.ffi.ffi_call(name, result)(x, matrix)


def _register(tile: Tile, half: bool) -> str:
    """Registers a kernel with XLA, and returns its name there."""
    from bpd_jax.models.cpu.row_kernel_code import product_module
    from bpd_jax.models.cpu.xla_kernel import register

    sizes = (tile.width, tile.outputs, tile.rows, int(half))
    name = "bpd_jax_rows_times_matrix_" + "_".join(map(str, sizes))
    register(name, lambda: product_module(tile, half))
    return name
