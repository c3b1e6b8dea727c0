"""Products of few rows with stored matrices on a GPU, a Pallas kernel in Triton.

XLA's compiler expands a matrix in blocks in memory before it multiplies, which costs
more than reading it in bfloat16; it copies a matrix of a stack (`InStack`) for each
layer; and with a single row it writes all products before it adds them. The kernel
reads a layer where it is and expands it in registers. A program computes some outputs
of some rows, and adds their chunks in order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float
from bpd_jax.models.stacks import InStack, in_stack

# More rows, as of a prompt, are worth an expanded matrix.
MOST_ROWS = 64
# … and so many are worth a copy of a matrix of a stack.
MOST_ROWS_STACKED = 256
# Programs that occupy a large GPU, twice its 132 multiprocessors.
_PROGRAMS = 264
# Outputs of a program; a tile of the tensor cores has 16.
_LEAST, _MOST = 16, 64
# Bytes of an output that a program reads at a time.
CHUNK = 128
# Chunks that a program adds at least.
_LEAST_CHUNKS = 4


def gpu_product(
    x: Float[Array, "M I"],
    matrix: Any,
    *,
    interpret: bool = False,
) -> Float[Array, "M O"]:
    """`x @ matrix.T` of few rows, in float32.

    The matrix `[O, I]`, an array, a `QuantizedMatrix` or an `InStack` of one of these,
    has the values of the expanded one, cast to the dtype of x. The number of rows does
    not change the order in which chunks are added.
    """
    # Imported late: the import takes a second, and only GPUs need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    several = in_stack(matrix)
    stack, layer = several.stack, jnp.asarray(several.index, jnp.int32).reshape(1)
    count, outputs, scale, halves = len(x), several.shape[0], None, 1
    arrays = [stack]
    if not hasattr(stack, "ndim"):
        # What blocks have besides integers; a scale of a whole output is applied last.
        arrays = [stack.integers, stack.scales, stack.minima]
        arrays, halves = [a for a in arrays if a is not None], 8 // stack.bits
        if stack.by_output:
            arrays, scale = arrays[:1], InStack(stack.scales, layer[0]).chosen()
    blocks = arrays[1].shape[-1] if len(arrays) > 1 else 1
    # A byte of 4-bit integers has numbers of both halves of its block.
    operand = x.reshape(count, blocks, halves, -1).transpose(2, 1, 3, 0)
    operand = operand.reshape(-1, count)
    tile = _MOST
    while tile > _LEAST and outputs < tile * _PROGRAMS:
        tile //= 2
    rows = min(max(pl.next_power_of_2(count), _LEAST), _MOST)
    # The chunks of an output are divided among several programs if outputs are few.
    chunk = CHUNK // arrays[0].dtype.itemsize
    chunks = pl.cdiv(arrays[0].shape[-1], chunk)
    parts = max(1, min(_PROGRAMS // pl.cdiv(outputs, tile), chunks // _LEAST_CHUNKS))

    def whole(array: Any) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

    result = jax.ShapeDtypeStruct((parts, outputs, count), jnp.float32)
    total = pl.pallas_call(
        functools.partial(
            _kernel, outputs=tile, rows=rows, halves=halves, chunk=chunk, parts=parts
        ),
        # Tiles of rows are next to each other, because they read the same numbers.
        grid=(pl.cdiv(count, rows), pl.cdiv(outputs, tile), parts),
        in_specs=[
            pl.BlockSpec((None,), lambda *_: (0,)),
            *map(whole, (operand, *arrays)),
        ],
        out_specs=whole(result),
        out_shape=result,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="matrix_product" if len(arrays) == 1 else "quantized_product",
    )(layer, operand, *arrays)
    product: Array = total.sum(0).T
    return product if scale is None else product * scale[:, 0]


def reads(several: InStack, rows: int) -> bool:
    """Whether `gpu_product` is to multiply so many rows with a matrix of a stack.

    For its own products XLA copies the matrix, and expands blocks in memory.
    """
    stack = several.stack
    if hasattr(stack, "ndim"):
        # Only a GPU has such stacks of arrays `[O, I]`; see `stacked_layers`.
        return rows <= MOST_ROWS_STACKED
    most = MOST_ROWS_STACKED if stack.by_output else MOST_ROWS
    return bool(stack.in_kernel) and rows <= most


def _kernel(
    layer_ref: Any,
    operand_ref: Any,
    matrix_ref: Any,
    *others: Any,
    outputs: int,
    rows: int,
    halves: int,
    chunk: int,
    parts: int,
) -> None:
    """A part of the sums of some outputs; an operand `[halves · length, M]`.

    The length is that of a stored output, whose scales and minima are `others`.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *about_refs, result_ref = others
    all_outputs, length = matrix_ref.shape[1:]
    dtype, count = operand_ref.dtype, operand_ref.shape[1]
    layer, part = layer_ref[()], pl.program_id(2)
    blocks = about_refs[0].shape[-1] if about_refs else 1
    size = length // blocks
    together = chunk // size
    # Triton's arrays have sizes that are powers of 2.
    here = pl.ds(pl.program_id(1) * outputs, outputs)
    output = (pl.program_id(1) * outputs + jnp.arange(outputs) < all_outputs)[:, None]
    every = pl.ds(pl.program_id(0) * rows, rows)
    row = pl.program_id(0) * rows + jnp.arange(rows) < count
    # Products of float32 are not rounded to TF32; see `attention.product`.
    exact = dtype == jnp.float32
    dot = functools.partial(triton.dot, allow_tf32=False if exact else None)

    def add_chunk(index: Array, total: Array) -> Array:
        column = pl.ds(index * chunk, chunk)
        within = index * chunk + jnp.arange(chunk) < length
        stored = triton.load(
            matrix_ref.at[layer, here, column], mask=output & within, other=0
        )
        scales_minima = []
        if about_refs:
            block = pl.ds(index * together, together)
            known = index * together + jnp.arange(together) < blocks
            scales_minima = [
                triton.load(ref.at[layer, here, block], mask=output & known, other=0)
                for ref in about_refs
            ]
        for half in range(halves):
            values = stored >> 4 * half & 15 if halves == 2 else stored
            if about_refs:
                values = values.astype(jnp.float32).reshape(outputs, together, size)
                values *= scales_minima[0][:, :, None]
                for minimum in scales_minima[1:]:
                    values += minimum[:, :, None]
                values = values.reshape(outputs, chunk)
            place = pl.ds(half * length + index * chunk, chunk)
            mask = within[:, None] & row
            x = triton.load(operand_ref.at[place, every], mask=mask, other=0)
            total += dot(values.astype(dtype), x)
        return total

    chunks = pl.cdiv(length, chunk)
    share = pl.cdiv(chunks, parts)
    low = part * share
    total = jax.lax.fori_loop(
        low,
        jnp.minimum(low + share, chunks),
        add_chunk,
        jnp.zeros((outputs, rows), jnp.float32),
    )
    triton.store(result_ref.at[part, here, every], total, mask=output & row)
