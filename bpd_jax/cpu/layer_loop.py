"""What a loop over the layers of a decoding pass needs on a CPU; see `layer_loop`.

XLA would copy each layer's matrices and cache for the body of the loop; the kernels
choose them by the number of the layer (`OneOf`), so that they stay where they are.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int, Params
from bpd_jax.cpu.attention_kernel import reads
from bpd_jax.cpu.operands import OneOf
from bpd_jax.cpu.products import KernelPacked
from bpd_jax.cpu.tiled_matrix import TiledMatrix
from bpd_jax.models.cache import KVCache

# Larger arrays than norms and biases, of all layers, would take long to stack.
_MOST = 1 << 20


def has_kernels(layers: Sequence[Params], cache: KVCache | None) -> bool:
    """Whether kernels read all matrices of these layers, and their cache if any."""
    if len(layers) < 2:
        return False
    leaves = jax.tree.leaves(layers[0], is_leaf=_is_packed)
    matrices = [leaf.rows for leaf in leaves if _is_packed(leaf)]
    if not matrices:  # Of training, or modules that are being initialized.
        return False
    kinds = {_kind(layer) for layer in layers}
    others = sum(leaf.size for leaf in leaves if not _is_packed(leaf))
    return (
        len(kinds) == 1
        and others * len(layers) <= _MOST
        and all(isinstance(matrix, TiledMatrix) for matrix in matrices)
        # Lengths are a mask in a training pass.
        and (
            cache is None
            or (cache.lengths.ndim == 1 and reads(cache.keys[0], cache.values[0]))
        )
    )


def for_one_loop(
    layers: Sequence[Params], x: Float[Array, "B T D"], cache: KVCache | None
) -> tuple[Params, Any] | None:
    """Layers and cache for one loop, where kernels read all of them.

    See `DeviceOps.for_one_loop`.
    """
    if not has_kernels(layers, cache):
        return None

    def joined(*leaves: Any) -> Any:
        if _is_packed(leaves[0]):
            return KernelPacked(tuple(leaf.rows for leaf in leaves), leaves[0].shape)
        return jnp.stack(leaves)

    stack = jax.tree.map(joined, *layers, is_leaf=_is_packed)
    return stack, None if cache is None else _OfAllLayers(cache)


class _OfAllLayers:
    """A cache of which kernels read one layer."""

    def __init__(self, cache: KVCache):
        self._cache = cache

    def of_layer(self, number: Int[Array, ""]) -> KVCache:
        keys: Any = (OneOf(self._cache.keys, number),)
        values: Any = (OneOf(self._cache.values, number),)
        return KVCache(keys, values, self._cache.lengths)


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, KernelPacked)


def _kind(layer: Params) -> Any:
    """What layers must have in common."""
    leaves, structure = jax.tree.flatten(layer)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
