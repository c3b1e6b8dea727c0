"""A model made ready for decoding: precision, rounding, layout of its parameters."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params
from bpd_jax.models import device_ops
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.device_ops import on_cpu
from bpd_jax.models.layers import STACKED, is_stacked, separate_layers
from bpd_jax.models.partitioning import first_device, has_tensor_cores
from bpd_jax.models.products import Packed
from bpd_jax.models.quantized import (
    QuantizedMatrix,
    expanded,
    in_kernel,
    is_quantized,
    kernel_rows,
    rounded,
)
from bpd_jax.models.transformer_config import INT8, TransformerConfig

# The kernels of a GPU address a stack of bytes with 32-bit offsets.
_MOST_BYTES = 2**31


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
        Quantized matrices stay so, except on a CPU in another precision than float32.
        With `int8`, matrices are rounded, and activations where they are multiplied.
      rounds: whether matrices are rounded to 8 bits; says how large the error is.
    """
    trunk, params, of_cache = config.trunk, dict(params), None
    check_precision(trunk, mesh, precision, rounds=rounds)
    ops = device_ops.current()
    integers = precision == INT8
    if rounds or integers:
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
        of_cache = ops.cache_dtype(precision, trunk.head_width)
        trunk = dataclasses.replace(trunk, dtype=dtype)
    if integers:
        params["trunk"] = ops.integer_layout(params["trunk"])
    else:
        params["trunk"] = decoding_layout(params["trunk"], trunk.dtype, mesh)
    if mesh is None and has_tensor_cores(first_device(None)):
        params["trunk"] = in_kernel(params["trunk"])
    heads = config.heads
    if heads is not None and heads.has_softmax and not heads.own_softmax:
        params["heads"] = decoding_layout(
            params["heads"], trunk.dtype, mesh, exact=False
        )
    return dataclasses.replace(config, trunk=trunk), params, of_cache


def check_precision(
    trunk: TransformerConfig,
    mesh: Mesh | None,
    precision: str | None,
    *,
    rounds: bool = False,
) -> None:
    """Checks that `prepared` takes a model of these sizes, before weights are read."""
    if trunk.experts is not None and (rounds or precision == INT8):
        raise UserError(
            "weights_dtype=int8 does not round experts, which are most of this "
            "model: leave it out."
            if rounds
            else "precision=int8 is not for models of experts."
        )
    if precision == INT8:
        if mesh is not None:
            raise UserError("precision=int8 is for one device: leave out the mesh.")
        device_ops.current().check_integers(trunk)
    elif rounds and on_cpu(mesh) and precision not in (None, "float32"):
        raise UserError(
            f"weights_dtype=int8 gains nothing with precision={precision} on a "
            "CPU, which expands all matrices then: leave one of the two out."
        )


def decoding_layout(
    params: Params, dtype: str, mesh: Mesh | None = None, *, exact: bool = True
) -> Params:
    """The parameters of a trunk, block drafter or heads as this device reads them.

    On a mesh they are as they were; see `DeviceOps.layout`.
    """
    if mesh is not None:
        return params
    return device_ops.current().layout(params, dtype, exact=exact)


def _cast(params: Params, dtype: str) -> Params:
    """Floating-point matrices in a dtype; quantized ones are cast in products."""

    def cast(leaf: Any) -> Any:
        if is_quantized(leaf):
            return leaf
        matrix = leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if matrix else leaf

    return jax.tree.map(cast, params, is_leaf=is_quantized)


def stacked_layers(
    trunk: Params, config: TransformerConfig, mesh: Mesh | None
) -> Params:
    """The trunk with its layers stacked, where decoding loops over them.

    Layers that are not stored alike stay separate. So do those of a CPU, whose kernels
    read them where they are, and those that GPUs would copy: of experts, or on a mesh.
    On one GPU kernels of projections become `Packed`, as `quantized_kernel` reads them.
    """
    device, alone = first_device(mesh), mesh is None or mesh.size == 1
    on_gpu = device.platform == "gpu"
    in_kernel = alone and has_tensor_cores(device) and config.experts is None
    if is_stacked(trunk) or (on_gpu and not in_kernel) or (alone and on_cpu(mesh)):
        return trunk
    rest, layers = dict(trunk), []
    for layer in separate_layers(trunk, config.num_layers):
        layers.append(_packed(layer) if in_kernel else layer)
        for part in layer:
            del rest[f"{part}_{len(layers) - 1}"]
    kinds = {
        (structure, *((x.shape, x.dtype) for x in leaves))
        for leaves, structure in map(jax.tree.flatten, layers)
    }
    if len(kinds) > 1:
        return trunk
    if not in_kernel and any(map(_is_packed_array, _matrices(layers[0]))):
        return trunk  # Only the kernel of a GPU reads stacks of these.
    bytes_of = [x for x in jax.tree.leaves(layers[0]) if x.dtype.itemsize == 1]
    if in_kernel and any(x.size * len(layers) >= _MOST_BYTES for x in bytes_of):
        return trunk
    return {**rest, STACKED: jax.tree.map(_joined, *layers)}


def _matrices(layer: Params) -> list[Any]:
    return jax.tree.leaves(layer, is_leaf=lambda x: isinstance(x, Packed))


def _is_packed_array(matrix: Any) -> bool:
    """Whether it is an array `[O, I]`, as of blocks that were expanded."""
    return isinstance(matrix, Packed) and hasattr(matrix.rows, "ndim")


def _joined(*arrays: Any) -> Any:
    """Arrays of all layers as one, which is spread over devices as each of them is."""
    sharding = None
    if not isinstance(arrays[0], jax.core.Tracer):
        sharding = getattr(arrays[0], "sharding", None)
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(None, *sharding.spec)
        sharding = NamedSharding(sharding.mesh, spec)
        return jax.jit(lambda *x: jnp.stack(x), out_shardings=sharding)(*arrays)
    return jnp.stack(arrays)


def _packed(tree: Any, name: str = "") -> Any:
    """The projections of a layer as a kernel of a GPU reads them."""
    if not isinstance(tree, dict):
        return tree
    if "kernel" not in tree:
        return {key: _packed(value, key) for key, value in tree.items()}
    kernel = tree["kernel"]
    if not isinstance(kernel, Packed):
        kernel = Packed(kernel_rows(name, kernel), kernel.shape)
    elif isinstance(kernel.rows, QuantizedMatrix) and kernel.rows.by_output:
        rows = dataclasses.replace(kernel.rows, in_kernel=True)
        kernel = Packed(rows, kernel.shape)
    return {**tree, "kernel": kernel}
