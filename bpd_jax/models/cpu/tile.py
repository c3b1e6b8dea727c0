"""The tile size of the inner loops of the kernels."""

import dataclasses
import functools
import sys


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of the operands of an inner loop, which must fit into registers.

    Attributes:
      width: W, number of elements of a vector register.
      outputs: number of rows of the matrix, or of vectors of slots; a power of two.
      rows: number of rows of x, or of queries.
    """

    width: int
    outputs: int
    rows: int


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
