"""The size of the inner loop of `row_kernel`."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one inner loop multiplies, so that all of it stays in registers.

    Attributes:
      width: W, numbers of a vector register.
      outputs: rows of the matrix; a power of two.
      rows: rows of x.
    """

    width: int
    outputs: int
    rows: int
