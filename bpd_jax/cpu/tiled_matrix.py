"""Matrices as the kernels of products read them: outputs lie side by side.

A vector of W numbers holds one number of each of W outputs, where W is the width of a
vector of the processor. A product adds to it the products with one number of a row
after the other, in the order of K, so that no sum runs over a vector, the sums have the
same bits for any number of rows, and numbers are expanded once for all rows.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import AnyArray, Array, Float, Int
from bpd_jax.cpu.float_kernel import float_rows
from bpd_jax.cpu.integer_kernel import integer_rows, lanes
from bpd_jax.cpu.operands import OneOf, example
from bpd_jax.cpu.tile import ARM, GROUPS, Storage, tile_of_processor
from bpd_jax.models.products import StoredMatrix
from bpd_jax.models.quantized import QuantizedMatrix

# Numbers in a block that the kernels can read.
BLOCKS = (16, 32)


@flax.struct.dataclass
class TiledMatrix(StoredMatrix):
    """A matrix `[O, I]` in the order of the kernels.

    Attributes:
      words: uint32 `[G, n, words, W]`: of W outputs and each block the words that
        `storage` describes; G is a multiple of `GROUPS`, and what is added is zero.
      sizes: O and I; static, as are the others.
      storage: what is in the words.
      rounds_operands: whether products round the other operand to 8 bits.
    """

    words: Any
    sizes: tuple[int, int] = flax.struct.field(pytree_node=False)
    storage: Storage = flax.struct.field(pytree_node=False)
    rounds_operands: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def is_quantized(self) -> bool:  # type: ignore[override]
        return self.storage.scaled

    @property
    def shape(self) -> tuple[int, int]:
        return self.sizes

    def times(self, x: Float[Array, "... I"], dtype: str) -> Float[Array, "... O"]:
        return times_tiled(x, self)

    def values(self, dtype: str = "float32") -> Float[Array, "O I"]:
        values: Array = self[np.arange(self.shape[0])].astype(dtype)
        return values

    def rows(self, ids: Int[Array, " n"]) -> QuantizedMatrix | Array:
        """The matrix of some rows; an array `[n, I]` of floating-point numbers."""
        width = self.words.shape[-1]
        words = self.words[ids // width, :, :, ids % width]
        stored, count = self.storage, len(words)
        if not stored.scaled:
            dtype = jnp.float32 if stored.bits == 32 else jnp.bfloat16
            return jax.lax.bitcast_convert_type(words, dtype).reshape(count, -1)
        size = stored.integers
        integers, scales, minima = jnp.split(words, [size, size + 1], axis=2)
        integers = jax.lax.bitcast_convert_type(integers, jnp.uint8)
        if stored.bits == 8:
            integers = (integers ^ np.uint8(stored.offset)).astype(jnp.int8)

        def floats(part: Array) -> Array:
            return jax.lax.bitcast_convert_type(part[..., 0], jnp.float32)

        return QuantizedMatrix(
            integers.reshape(count, -1),
            floats(scales),
            floats(minima) if stored.minima else None,
        )

    def __getitem__(self, ids: Int[AnyArray, "..."] | slice) -> Float[Array, "... I"]:
        if isinstance(ids, slice):
            ids = np.arange(self.shape[0])[ids]
        ids = jnp.asarray(ids)
        rows = self.rows(ids.ravel())
        values = rows.values() if isinstance(rows, QuantizedMatrix) else rows
        return values.reshape(*ids.shape, -1)


def times_tiled(
    x: Float[Array, "... I"], tiles: TiledMatrix | OneOf
) -> Float[Array, "... O"]:
    """Products with all rows of a matrix, in float32."""
    matrix: TiledMatrix = example(tiles)
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    multiply = integer_rows if matrix.rounds_operands else float_rows
    total = multiply(rows, tiles)[:, : matrix.shape[0]]
    return total.reshape(*x.shape[:-1], -1)


def tiled(
    matrix: AnyArray | QuantizedMatrix,
    width: int | None = None,
    *,
    rounds_operands: bool = False,
) -> TiledMatrix:
    """A matrix in float32, bfloat16 or blocks of 16 or 32 numbers, in tiles.

    `width` is W, by default that of this processor.
    """
    if width is None:
        tile = tile_of_processor()
        assert tile is not None
        width = lanes() if rounds_operands else tile.width
    assert width is not None
    outputs, length = matrix.shape
    if isinstance(matrix, QuantizedMatrix):
        storage, parts = _quantized(matrix, width)
    else:
        array = np.ascontiguousarray(matrix)
        bits = 8 * array.dtype.itemsize
        storage, parts = Storage(bits, 32 // bits), [array]
    blocks = length // storage.block
    groups = -(-outputs // (width * GROUPS)) * GROUPS
    words = np.empty((groups, blocks, storage.words, width), np.uint32)
    words[outputs // width :] = 0
    # Groups are written one after the other, so that all that is read stays near.
    place = 0
    for part in parts:
        rows = part.view(np.uint32).reshape(outputs, blocks, -1)
        size = rows.shape[-1]
        for group in range(-(-outputs // width)):
            some = rows[group * width : (group + 1) * width]
            to = words[group, :, place : place + size, : len(some)]
            to[...] = some.transpose(1, 2, 0)
        place += size
    return TiledMatrix(
        jax.device_put(words), (outputs, length), storage, rounds_operands
    )


def _quantized(matrix: QuantizedMatrix, width: int) -> tuple[Storage, list[np.ndarray]]:
    integers, offset = np.asarray(matrix.integers), 0
    # ARM multiplies signed integers with signed ones.
    if matrix.bits == 8 and width != ARM and (integers < 0).any():
        integers, offset = integers.view(np.uint8) ^ np.uint8(128), 128
    parts = [integers, np.asarray(matrix.scales)]
    if matrix.minima is not None:
        parts.append(np.asarray(matrix.minima))
    has_minima = matrix.minima is not None
    return Storage(matrix.bits, matrix.block, offset, has_minima), parts
