"""Parameters as a CPU reads them fastest when it decodes.

XLA is fastest where the numbers that are summed lie side by side in both operands, and
the kernel for few rows (`row_kernel`) requires that. So every `kernel` `[I, O]` becomes
a `KernelPacked` one `[O, I]`. The time of a product of few rows is that of reading the
matrix, so matrices are stored in bfloat16 where that is allowed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import AnyArray, Array, Params
from bpd_jax.cpu.integer_kernel import BLOCKS, lanes, tiled
from bpd_jax.cpu.products import KernelPacked
from bpd_jax.cpu.tile import tile_of_processor
from bpd_jax.models.products import SOFTMAX, Packed
from bpd_jax.models.quantized import QuantizedMatrix, kernel_rows, quantize


def decoding_layout(params: Params, *, exact: bool = True) -> Params:
    """The parameters of a trunk, block drafter or heads as a CPU reads them.

    Projections are `KernelPacked`, and the matrix of the softmax has a second name,
    under which `logits` multiplies with it. Matrices in float32 become bfloat16 if all
    numbers of the matrix are representable in it, as those of checkpoints published in
    bfloat16.

    Args:
      exact: whether the results of products must stay the same, as those of a model.
        Otherwise, where there are `integer_rows`, the largest matrices are rounded to
        8 bits, so that products round activations too, and all others to bfloat16: the
        drafts differ slightly, and the time of a draft is that of reading its matrices.
    """
    rounds = not exact and lanes() is not None

    def stored(matrix: Any, layer: str) -> Any:
        # Layers that round activations attend and normalise as `integer_layout` has it,
        # which a draft does not need.
        is_in_layer = layer.startswith(("attention", "mlp"))
        if rounds and not is_in_layer and matrix.shape[-1] % BLOCKS[-1] == 0:
            is_small = isinstance(matrix, QuantizedMatrix)
            return tiled(matrix if is_small else quantize(matrix, BLOCKS[-1]))
        return _in_bfloat16(matrix, exact)

    def packed(tree: Any, name: str, layer: str = "") -> Any:
        if not isinstance(tree, dict):
            return tree
        kernel = tree.get("kernel")
        if isinstance(kernel, Packed):
            return {**tree, "kernel": KernelPacked(kernel.rows, kernel.shape)}
        # Heads have a kernel at the top, which is not that of a projection.
        if kernel is None or not name:
            return {key: packed(sub, key, layer or key) for key, sub in tree.items()}
        # On the host XLA compiles no program for each shape.
        rows = stored(kernel_rows(name, kernel if exact else np.asarray(kernel)), layer)
        return {**tree, "kernel": KernelPacked(rows, kernel.shape)}

    layout = packed(params, "")
    if SOFTMAX not in params:
        softmax = params.get("softmax", params.get("embedding"))
        rows = stored(softmax, SOFTMAX)
        layout[SOFTMAX] = KernelPacked(rows, softmax.shape[::-1])
    return layout


def integer_layout(params: Params) -> Params:
    """The quantized parameters of a trunk as integer products read them.

    All matrices are quantized in `BLOCKS`: `CpuOps.check_integers` accepts the model.
    """

    def arranged(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: arranged(sub) for key, sub in tree.items()}
        if isinstance(tree, Packed):
            return KernelPacked(tiled(tree.rows), tree.shape)
        return tree

    name = "softmax" if "softmax" in params else "embedding"
    softmax = tiled(params[name])
    packed = KernelPacked(softmax, softmax.shape[::-1])
    return {**arranged(params), name: softmax, SOFTMAX: packed}


def _in_bfloat16(
    matrix: AnyArray | QuantizedMatrix, exact: bool
) -> Array | QuantizedMatrix:
    """The matrix in bfloat16, unless that would change numbers of an exact one.

    Quantized matrices stay as they are, and matrices that the kernel cannot read stay
    in float32: XLA would convert them back.
    """
    if isinstance(matrix, QuantizedMatrix):
        return matrix
    tile = tile_of_processor()
    if matrix.dtype != jnp.float32 or tile is None or matrix.shape[-1] % tile.width:
        return jnp.asarray(matrix)
    if exact:
        bits = np.asarray(matrix).view(np.uint32).ravel()
        low = np.uint32(0xFFFF)
        # Most matrices are decided by their first numbers.
        if (bits[:1024] & low).any() or (bits & low).any():
            return jnp.asarray(matrix)
    # On the host XLA compiles nothing.
    return jax.device_put(np.asarray(matrix).astype(jnp.bfloat16))
