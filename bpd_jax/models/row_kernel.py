"""A product of few rows with a large matrix on a CPU, which reads the matrix once.

Verifying a draft multiplies 2 to 32 rows with every matrix of the model. XLA first
rearranges the matrix for such a product, which takes about as long as the product;
this kernel reads the matrix as it lies in memory. `benchmarks.row_products` compares
the two.

Every number of the result is summed in the same order, however many rows there are: the
products of a token are the same bits in a pass over one token and in a pass over a
draft.
"""

import functools
import sys

import jax
import jax.numpy as jnp

from bpd_jax.models.kernel_tile import Tile
from bpd_jax.typing import Array

# Above this many rows XLA's products are as fast.
MOST_ROWS = 48


@functools.cache
def tile_of_processor() -> Tile | None:
    """The tile for this processor; None if it lacks fused multiply-add, or LLVM."""
    try:
        # Imported late: other devices do not need LLVM.
        from llvmlite import binding
    except ImportError:
        return None
    if sys.maxsize < 2**32:
        return None
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return Tile(width=16, outputs=4, rows=6)
    if features.get("avx2") and features.get("fma"):
        return Tile(width=8, outputs=2, rows=4)
    if binding.get_default_triple().startswith(("aarch64", "arm64")):
        return Tile(width=4, outputs=4, rows=4)
    return None


def applies(x: Array, matrix: Array) -> bool:
    """Whether `rows_times_matrix` supports these arrays and is faster than XLA.

    Args:
      x: `[..., K]`.
      matrix: `[O, K]`.
    """
    if jax.default_backend() != "cpu" or (x.dtype, matrix.dtype) != (jnp.float32,) * 2:
        return False
    tile = tile_of_processor()
    length = x.shape[-1]
    if tile is None or not length or length % tile.width:
        return False
    return 0 < x.size // length <= MOST_ROWS


def rows_times_matrix(x: Array, matrix: Array, tile: Tile | None = None) -> Array:
    """`x @ matrix.T` in float32, where `applies`.

    Args:
      x: `[M, K]`.
      matrix: `[O, K]`.
      tile: whose width divides K; None for that of this processor.

    Returns:
      `[M, O]`.
    """
    tile = tile or tile_of_processor()
    assert tile is not None
    result = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(_register(tile), result)(x, matrix)


def _register(tile: Tile) -> str:
    """Registers a kernel with XLA, and returns its name there."""
    from bpd_jax.models.row_kernel_code import product_module
    from bpd_jax.models.xla_kernel import register

    name = f"bpd_jax_rows_times_matrix_{tile.width}_{tile.outputs}_{tile.rows}"
    register(name, lambda: product_module(tile))
    return name
