"""What kernels are called with: matrices, and one of several in a loop over layers."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array


@flax.struct.dataclass
class OneOf:
    """One of several equal arrays or matrices, chosen while a program runs.

    A loop over layers has one for each matrix, which only kernels can read: they choose
    an address, so that nothing is copied.

    Attributes:
      options: of the layers, with equal shapes and storage.
      index: int32, which of them it is.
    """

    options: tuple[Any, ...]
    index: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """That of each option."""
        shape: tuple[int, ...] = self.options[0].shape
        return shape

    @property
    def dtype(self) -> Any:
        """That of each option, which is an array."""
        return self.options[0].dtype


def example(matrix: Any) -> Any:
    """The first option of a `OneOf`; a matrix itself."""
    return matrix.options[0] if isinstance(matrix, OneOf) else matrix


def operands(*matrices: Any) -> list[Array]:
    """What a kernel is called with to read one of each: the index, all arrays by layer.

    The indices of several `OneOf` must be equal.
    """
    several = [x if isinstance(x, OneOf) else OneOf((x,), 0) for x in matrices]
    layers = zip(*(each.options for each in several), strict=True)
    return [jnp.asarray(several[0].index, jnp.int32), *jax.tree.leaves([*layers])]
