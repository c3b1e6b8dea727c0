"""Products with matrices in blocks on a GPU, a Pallas kernel in Triton.

XLA's compiler expands such a matrix in memory before it multiplies, which costs more
than reading it in bfloat16. The kernel reads integers and scales and expands them in
registers. A program computes some outputs of all rows, and adds their chunks in order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float

# More rows, as of a prompt, are worth an expanded matrix.
MOST_ROWS = 64
# Programs that occupy a large GPU, twice its 132 multiprocessors.
_PROGRAMS = 264
# Outputs of a program; a tile of the tensor cores has 16.
_LEAST, _MOST = 16, 64
# Bytes of an output that a program reads at a time.
CHUNK = 128


def gpu_product(
    x: Float[Array, "M I"], matrix: Any, *, interpret: bool = False
) -> Float[Array, "M O"]:
    """`x @ matrix.T` of at most `MOST_ROWS` rows, in float32.

    The matrix, a `QuantizedMatrix`, has the values of the expanded one, cast to the
    dtype of x.
    """
    # Imported late: the import takes a second, and only GPUs need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, outputs = len(x), matrix.shape[0]
    blocks = matrix.scales.shape[1]
    # A byte of 4-bit integers has numbers of both halves of its block.
    halves = 8 // matrix.bits
    operand = x.reshape(rows, blocks, halves, -1).transpose(2, 1, 3, 0)
    operand = operand.reshape(-1, rows)
    tile = _MOST
    while tile > _LEAST and outputs < tile * _PROGRAMS:
        tile //= 2

    def whole(array: Any) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda i: (0,) * array.ndim)

    result = jax.ShapeDtypeStruct((outputs, rows), jnp.float32)
    # What blocks have besides integers.
    about = [matrix.scales] if matrix.minima is None else [matrix.scales, matrix.minima]
    total: Array = pl.pallas_call(
        functools.partial(
            _kernel,
            outputs=tile,
            rows=max(pl.next_power_of_2(rows), _LEAST),
            halves=halves,
        ),
        grid=(pl.cdiv(outputs, tile),),
        in_specs=[*map(whole, (operand, matrix.integers, *about))],
        out_specs=whole(result),
        out_shape=result,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="quantized_product",
    )(operand, matrix.integers, *about)
    return total.T


def _kernel(
    operand_ref: Any,
    integers_ref: Any,
    scales_ref: Any,
    *others: Any,
    outputs: int,
    rows: int,
    halves: int,
) -> None:
    """Some outputs; an operand `[halves · bytes of an output, M]`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *minima_refs, result_ref = others
    (all_outputs, length), blocks = integers_ref.shape, scales_ref.shape[1]
    dtype, count = operand_ref.dtype, operand_ref.shape[1]
    size = length // blocks
    together = CHUNK // size
    # Triton's arrays have sizes that are powers of 2.
    begin = pl.program_id(0) * outputs
    here = pl.ds(begin, outputs)
    output = (begin + jnp.arange(outputs) < all_outputs)[:, None]
    row, every = jnp.arange(rows) < count, pl.ds(0, rows)
    # Products of float32 are not rounded to TF32; see `attention.product`.
    exact = dtype == jnp.float32
    dot = functools.partial(triton.dot, allow_tf32=False if exact else None)

    def add_chunk(index: Array, total: Array) -> Array:
        block, column = pl.ds(index * together, together), pl.ds(index * CHUNK, CHUNK)
        known = index * together + jnp.arange(together) < blocks
        within = index * CHUNK + jnp.arange(CHUNK) < length
        scales, *minima = (
            triton.load(ref.at[here, block], mask=output & known, other=0)
            for ref in (scales_ref, *minima_refs)
        )
        packed = triton.load(
            integers_ref.at[here, column], mask=output & within, other=0
        )
        for half in range(halves):
            integers = packed >> 4 * half & 15 if halves == 2 else packed
            values = integers.astype(jnp.float32).reshape(outputs, together, size)
            values *= scales[:, :, None]
            for minimum in minima:
                values += minimum[:, :, None]
            part = pl.ds(half * length + index * CHUNK, CHUNK)
            mask = within[:, None] & row
            x = triton.load(operand_ref.at[part, every], mask=mask, other=0)
            total += dot(values.reshape(outputs, CHUNK).astype(dtype), x)
        return total

    total = jax.lax.fori_loop(
        0, pl.cdiv(length, CHUNK), add_chunk, jnp.zeros((outputs, rows), jnp.float32)
    )
    triton.store(result_ref.at[here, every], total, mask=output & row)
