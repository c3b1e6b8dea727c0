"""Parameters as the devices read them fastest when they decode.

On a CPU, XLA is fastest where the numbers that are summed lie side by side in both
operands, and the kernel for few rows (`row_kernel`) requires that. So every `kernel`
`[I, O]` becomes a `Packed` one `[O, I]`. The time of a product of few rows is that of
reading the matrix, so matrices are stored in bfloat16 where that is allowed.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import AnyArray, Array, Params
from bpd_jax.cpu.attention_kernel import cache_dtype
from bpd_jax.cpu.device import on_cpu
from bpd_jax.cpu.integer_kernel import BLOCKS, lanes, tiled
from bpd_jax.cpu.tile import tile_of_processor
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.partitioning import first_device, has_tensor_cores
from bpd_jax.models.quantized import (
    Packed,
    QuantizedMatrix,
    TiledMatrix,
    expanded,
    is_quantized,
    kernel_rows,
    quantize,
    rounded,
)
from bpd_jax.models.quantized_kernel import in_kernel
from bpd_jax.models.transformer_config import INT8

# The name of the matrix of the softmax `[V, D]` for `logits`. The embedding, which may
# be the same matrix, keeps its name and dtype.
SOFTMAX = "softmax_for_decoding"


def prepared(
    config: BlockwiseConfig,
    params: Params,
    mesh: Mesh | None,
    precision: str | None,
    *,
    rounds: bool = False,
) -> tuple[BlockwiseConfig, Params, str | None]:
    """Sizes and parameters of a model as its devices decode it; the cache's dtype.

    The softmax of the heads' draft vocabulary, which only drafts, may be rounded. The
    dtype is None for that of activations.

    Args:
      precision: one of `PRECISIONS`, that of activations, products and matrices; None
        for the model's own. Casting matrices once has the same result as casting them
        in every pass. Vectors, such as the scales of norms, keep their precision.
        Quantized matrices stay so unless a CPU multiplies them, only in float32. With
        `int8`, matrices are rounded, and activations where they are multiplied.
      rounds: whether matrices are rounded to 8 bits; says how large the error is.
    """
    trunk, params, of_cache = config.trunk, dict(params), None
    integers = precision == INT8
    if rounds or integers:
        if trunk.experts is not None:
            raise UserError(
                "weights_dtype=int8 does not round experts, which are most of this "
                "model: leave it out."
                if rounds
                else "precision=int8 is not for models of experts."
            )
        if integers:
            check_integers(trunk.head_width)
        elif on_cpu(mesh) and precision not in (None, "float32"):
            raise UserError(
                f"weights_dtype=int8 gains nothing with precision={precision} on a "
                "CPU, which expands all matrices then: leave one of the two out."
            )
        by_output = not on_cpu(mesh)
        params["trunk"], error = rounded(params["trunk"], by_output=by_output)
        if error:
            about = f"weights rounded to 8 bits: relative error {error:.2%}"
            progress.say(about, sys.stderr)
        elif rounds:
            about = "all matrices are quantized already: none is rounded"
            progress.say(about, sys.stderr)
    if precision is not None:
        dtype = "float32" if integers else precision
        if on_cpu() and dtype != "float32":
            params = expanded(params)
        params = _cast(params, dtype)
        of_cache = cache_dtype(precision, trunk.head_width)
        trunk = dataclasses.replace(trunk, dtype=dtype)
    if integers:
        params["trunk"] = integer_layout(params["trunk"])
    else:
        params["trunk"] = decoding_layout(params["trunk"], mesh)
    if mesh is None and has_tensor_cores(first_device(None)):
        params["trunk"] = in_kernel(params["trunk"])
    heads = config.heads
    if heads is not None and heads.has_softmax and not heads.own_softmax:
        params["heads"] = decoding_layout(params["heads"], mesh, exact=False)
    return dataclasses.replace(config, trunk=trunk), params, of_cache


def decoding_layout(
    params: Params, mesh: Mesh | None = None, *, exact: bool = True
) -> Params:
    """The parameters of a trunk, block drafter or heads as this device reads them.

    On a CPU projections are `Packed`, and the matrix of the softmax has a second
    name, under which `logits` multiplies with it. Matrices in float32 become bfloat16
    if all numbers of the matrix are representable in it, as those of checkpoints
    published in bfloat16. For other devices the parameters are returned as they are.

    Args:
      exact: whether the results of products must stay the same, as those of a model.
        Otherwise, where there are `integer_rows`, the largest matrices are rounded to
        8 bits, so that products round activations too, and all others to bfloat16: the
        drafts differ slightly, and the time of a draft is that of reading its matrices.
    """
    if mesh is not None or not on_cpu():
        return params

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
        # Heads have a kernel at the top, which is not that of a projection.
        if kernel is None or isinstance(kernel, Packed) or not name:
            return {key: packed(sub, key, layer or key) for key, sub in tree.items()}
        # On the host XLA compiles no program for each shape.
        rows = stored(kernel_rows(name, kernel if exact else np.asarray(kernel)), layer)
        return {**tree, "kernel": Packed(rows, kernel.shape)}

    layout = packed(params, "")
    if SOFTMAX not in params:
        softmax = params.get("softmax", params.get("embedding"))
        layout[SOFTMAX] = Packed(stored(softmax, SOFTMAX), softmax.shape[::-1])
    return layout


def multiplies_quantized(precision: str | None, mesh: Mesh | None) -> bool:
    """Whether products expand quantized matrices at no cost, and to the same results.

    So do the kernels of a CPU, in float32, and with integers.
    """
    known = mesh is None and precision in (None, "float32", INT8)
    return known and on_cpu() and tile_of_processor() is not None


def check_integers(head_width: int) -> None:
    """Checks that integers can be multiplied here and in this model.

    `head_width` is H, the number of features of a head.
    """
    tile = tile_of_processor()
    if not on_cpu() or lanes() is None or tile is None:
        raise UserError(
            "precision=int8 needs a CPU with AVX2, AVX-512 or ARM's products of "
            "integers: only there are the texts of all methods equal."
        )
    if head_width % tile.width:
        raise UserError(
            "precision=int8 is for models whose heads have a multiple of "
            f"{tile.width} features, not {head_width}."
        )


def integer_layout(params: Params) -> Params:
    """The quantized parameters of a trunk as integer products read them.

    All matrices are quantized, and `check_integers` accepts the model.
    """

    def arranged(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: arranged(sub) for key, sub in tree.items()}
        if isinstance(tree, Packed):
            return Packed(tiles(tree.rows), tree.shape)
        return tree

    def tiles(rows: Any) -> TiledMatrix:
        if not isinstance(rows, QuantizedMatrix) or rows.block not in BLOCKS:
            raise UserError(
                "precision=int8 is for models whose matrices are in blocks of 16 or "
                "32 numbers, but one has rows that cannot be split into them."
            )
        return tiled(rows)

    name = "softmax" if "softmax" in params else "embedding"
    softmax = tiles(params[name])
    packed = Packed(softmax, softmax.shape[::-1])
    return {**arranged(params), name: softmax, SOFTMAX: packed}


def _cast(params: Params, dtype: str) -> Params:
    """Floating-point matrices in a dtype; quantized ones are cast in products."""

    def cast(leaf: Any) -> Any:
        if is_quantized(leaf):
            return leaf
        matrix = leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if matrix else leaf

    return jax.tree.map(cast, params, is_leaf=is_quantized)


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
