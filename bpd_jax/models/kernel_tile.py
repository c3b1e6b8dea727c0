"""The size of the inner loops of our kernels."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one inner loop multiplies, so that all of it stays in registers.

    Attributes:
      width: W, numbers of a vector register.
      outputs: rows of the matrix, or vectors of slots; a power of two.
      rows: rows of x, or queries.
    """

    width: int
    outputs: int
    rows: int
