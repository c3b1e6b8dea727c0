"""A loop over the layers of a decoding pass on a CPU.

The body is traced and compiled once instead of once per layer. XLA would copy each
layer's matrices and cache for it; the kernels choose them by the number of the layer
(`OneOf`), so that they stay where they are.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Params, PyTree
from bpd_jax.cpu.attention_kernel import reads
from bpd_jax.cpu.integer_kernel import TiledMatrix
from bpd_jax.cpu.operands import OneOf
from bpd_jax.cpu.products import KernelPacked
from bpd_jax.cpu.row_kernel import applies
from bpd_jax.models.cache import KeyValues, KVCache
from bpd_jax.models.transformer_config import TransformerConfig

# Larger arrays than norms and biases, of all layers, would take long to stack.
_MOST = 1 << 20


def has_kernels(
    layers: Sequence[Params], x: Float[Array, "B T D"], cache: KVCache | None
) -> bool:
    """Whether kernels read all matrices of these layers and their cache.

    `x` is their input, and `cache` what they attend to besides new tokens.
    """
    if len(layers) < 2:
        return False
    kinds = {_kind(layer) for layer in layers}
    leaves = jax.tree.leaves(layers[0], is_leaf=_is_packed)
    matrices = [leaf.rows for leaf in leaves if _is_packed(leaf)]
    others = sum(leaf.size for leaf in leaves if not _is_packed(leaf))
    return (
        len(kinds) == 1
        and bool(matrices)
        and others * len(layers) <= _MOST
        and all(_has_kernel(matrix, x) for matrix in matrices)
        # Lengths are a mask in a training pass.
        and (
            cache is None
            or (cache.lengths.ndim == 1 and reads(cache.keys[0], cache.values[0]))
        )
    )


def loop_over_layers(
    config: TransformerConfig,
    run: Callable[..., tuple[Array, PyTree]],
    layers: Sequence[Params] | None,
    x: Float[Array, "B T D"],
    cache: KVCache | None,
    earlier: KeyValues | None,
) -> tuple[Float[Array, "B T D"], PyTree] | None:
    """Runs all layers, where they are equal and kernels read their matrices and cache.

    See `DeviceOps.loop_over_layers`.
    """
    if layers is None or not config.has_equal_layers:
        return None
    if not has_kernels(layers, x, cache):
        return None
    structure: Any = jax.tree.structure(layers[0], is_leaf=_is_packed)
    leaves = (jax.tree.leaves(layer, is_leaf=_is_packed) for layer in layers)
    groups = list(zip(*leaves, strict=True))
    small = [None if _is_packed(group[0]) else jnp.stack(group) for group in groups]

    def step(x: Array, of_layer: Any) -> tuple[Array, PyTree]:
        index, small, drafts = of_layer

        def chosen(group: Sequence[Any], one: Array | None) -> Any:
            if one is not None:
                return one
            rows = OneOf(tuple(each.rows for each in group), index)
            return KernelPacked(rows, group[0].shape)

        params = structure.unflatten(map(chosen, groups, small))
        of_cache = None
        if cache is not None:
            keys: Any = (OneOf(cache.keys, index),)
            values: Any = (OneOf(cache.values, index),)
            of_cache = KVCache(keys, values, cache.lengths)
        return run(params, x, of_cache, drafts)

    return jax.lax.scan(step, x, (jnp.arange(len(layers)), small, earlier))


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, KernelPacked)


def _kind(layer: Params) -> Any:
    """What layers must have in common."""
    leaves, structure = jax.tree.flatten(layer)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _has_kernel(matrix: Any, x: Array) -> bool:
    if isinstance(matrix, TiledMatrix):
        return True
    rows = math.prod(x.shape[:-1]), matrix.shape[1]
    return applies(jax.ShapeDtypeStruct(rows, x.dtype), matrix)
