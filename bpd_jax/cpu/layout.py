"""Parameters as a CPU reads them fastest when it decodes.

Every `kernel` `[I, O]` becomes a `KernelPacked` one, in tiles of the kernels of
products. The time of a product of few rows is that of reading the matrix, so matrices
are stored in bfloat16 where that is allowed. Where XLA multiplies, the numbers that are
summed lie side by side, `[O, I]`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import AnyArray, Params
from bpd_jax.cpu.integer_kernel import lanes
from bpd_jax.cpu.products import KernelPacked
from bpd_jax.cpu.tile import tile_of_processor
from bpd_jax.cpu.tiled_matrix import BLOCKS, TiledMatrix, tiled
from bpd_jax.models.products import SOFTMAX, Packed
from bpd_jax.models.quantized import QuantizedMatrix, kernel_rows, quantize


def decoding_layout(params: Params, dtype: str, *, exact: bool = True) -> Params:
    """The parameters of a trunk, block drafter or heads as a CPU reads them.

    Projections are `KernelPacked`, and the matrix of the softmax has a second name,
    under which `logits` multiplies with it. Kernels multiply in float32, and matrices
    in float32 become bfloat16 if all numbers of the matrix are representable in it, as
    those of checkpoints published in bfloat16.

    Args:
      dtype: that of activations.
      exact: whether the results of products must stay the same, as those of a model.
        Otherwise, where there are `integer_rows`, the largest matrices are rounded to
        8 bits, so that products round activations too, and all others to bfloat16: the
        drafts differ slightly, and the time of a draft is that of reading its matrices.
    """
    rounds = not exact and lanes() is not None
    tile = tile_of_processor()
    in_tiles = dtype == "float32" and tile is not None

    def stored(matrix: Any, layer: str = "") -> Any:
        # Layers that round activations attend and normalise as `integer_layout` has it,
        # which a draft does not need.
        is_in_layer = layer.startswith(("attention", "mlp"))
        small = rounds and not is_in_layer and matrix.shape[-1] % BLOCKS[-1] == 0
        if isinstance(matrix, TiledMatrix):
            if matrix.rounds_operands or not small:
                return matrix
            if matrix.storage.scaled and matrix.words.shape[-1] == lanes():
                # The words are shared with the model.
                return dataclasses.replace(matrix, rounds_operands=True)
            matrix = matrix.rows(jnp.arange(matrix.shape[0]))
        quantized = isinstance(matrix, QuantizedMatrix)
        if small:
            integers = matrix if quantized else quantize(matrix, BLOCKS[-1])
            return tiled(integers, rounds_operands=True)
        if not quantized and tile is not None:
            matrix = _in_bfloat16(matrix, exact)
        elif quantized and in_tiles and matrix.block not in BLOCKS:
            matrix = matrix.values()
        if in_tiles:
            return tiled(matrix)
        return matrix if quantized else jnp.asarray(matrix)

    def packed(tree: Any, name: str, layer: str = "") -> Any:
        if not isinstance(tree, dict):
            return tree
        kernel = tree.get("kernel")
        # Heads have a kernel at the top, which is not that of a projection.
        if kernel is None or not name:
            return {key: packed(sub, key, layer or key) for key, sub in tree.items()}
        if isinstance(kernel, Packed):
            rows = stored(kernel.rows, layer)
        else:
            # On the host XLA compiles no program for each shape.
            rows = np.asarray(kernel) if in_tiles or not exact else kernel
            rows = stored(kernel_rows(name, rows), layer)
        return {**tree, "kernel": KernelPacked(rows, kernel.shape)}

    layout = packed(params, "")
    if SOFTMAX not in params:
        name = "softmax" if "softmax" in params else "embedding"
        rows = stored(params[name], SOFTMAX)
        layout[SOFTMAX] = KernelPacked(rows, rows.shape[::-1])
        if exact and isinstance(rows, TiledMatrix):
            layout[name] = rows
    return layout


def integer_layout(params: Params) -> Params:
    """The quantized parameters of a trunk as integer products read them.

    All matrices are quantized in `BLOCKS`: `CpuOps.check_integers` accepts the model.
    """

    def arranged(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: arranged(sub) for key, sub in tree.items()}
        if isinstance(tree, Packed):
            return KernelPacked(tiled(tree.rows, rounds_operands=True), tree.shape)
        return tree

    name = "softmax" if "softmax" in params else "embedding"
    softmax = tiled(params[name], rounds_operands=True)
    packed = KernelPacked(softmax, softmax.shape[::-1])
    return {**arranged(params), name: softmax, SOFTMAX: packed}


def _in_bfloat16(matrix: AnyArray, exact: bool) -> AnyArray:
    """The matrix in bfloat16, unless that would change numbers of an exact one.

    Rows of an odd number of numbers stay in float32: words hold two.
    """
    array = np.asarray(matrix)
    if array.dtype != jnp.bfloat16 or array.shape[-1] % 2:
        array = array.astype(jnp.float32, copy=False)
    if array.dtype == jnp.bfloat16 or array.shape[-1] % 2:
        return array
    if exact:
        bits = array.view(np.uint32).ravel()
        low = np.uint32(0xFFFF)
        # Most matrices are decided by their first numbers.
        if (bits[:1024] & low).any() or (bits & low).any():
            return array
    # On the host XLA compiles nothing.
    return array.astype(jnp.bfloat16)
