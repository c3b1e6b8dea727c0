"""The tile size of the inner loops of the CPU kernels."""

import dataclasses


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
