"""Products with packed matrices by the kernels of a CPU, where there are any.

The kernels have no gradient, and XLA does not spread them over devices.
"""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.cpu.integer_kernel import TiledMatrix, integer_rows
from bpd_jax.cpu.operands import OneOf, example
from bpd_jax.cpu.row_kernel import applies, expanded, rows_times_matrix
from bpd_jax.models.products import Packed, times_rows
from bpd_jax.models.quantized import QuantizedMatrix


@flax.struct.dataclass
class KernelPacked(Packed):
    """A packed kernel with which kernels of this device multiply.

    Attributes:
      rows: also a `OneOf`; for a loop over layers a tuple of those of all layers.
    """

    def times(self, x: Float[Array, "... I"], dtype: str) -> Float[Array, "... O"]:
        return times_packed(x, self.rows, dtype)

    def of_layer(self, number: int | Int[Array, ""]) -> "KernelPacked":
        return dataclasses.replace(self, rows=OneOf(self.rows, number))


def times_packed(x: Array, rows: Any, dtype: str) -> Array:
    """`times_rows` by the kernels for decoding, where there are any."""
    if isinstance(example(rows), TiledMatrix):
        total = integer_rows(x.reshape(-1, x.shape[-1]).astype(jnp.float32), rows)
        return total.reshape(*x.shape[:-1], rows.shape[0])
    if not applies(x, rows) or dtype != "float32":
        if isinstance(rows, QuantizedMatrix):
            rows = expanded(rows).astype(dtype)
        return times_rows(x, rows, dtype)
    total = rows_times_matrix(x.reshape(-1, x.shape[-1]), rows)
    return total.reshape(*x.shape[:-1], rows.shape[0])
