"""Packed matrices with which the kernels of a CPU multiply.

The kernels have no gradient, and XLA does not spread them over devices.
"""

import dataclasses

import flax.struct

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.cpu.operands import OneOf
from bpd_jax.cpu.tiled_matrix import times_tiled
from bpd_jax.models.products import Packed


@flax.struct.dataclass
class KernelPacked(Packed):
    """A packed kernel in tiles.

    Attributes:
      rows: a `TiledMatrix`, or a `OneOf` of some; for a loop over layers a tuple of
        those of all layers; an array where XLA multiplies.
    """

    def times(self, x: Float[Array, "... I"], dtype: str) -> Float[Array, "... O"]:
        if isinstance(self.rows, OneOf):
            return times_tiled(x, self.rows)
        return super().times(x, dtype)

    def of_layer(self, number: int | Int[Array, ""]) -> "KernelPacked":
        return dataclasses.replace(self, rows=OneOf(self.rows, number))
