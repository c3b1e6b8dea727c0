"""Attention, norms and activations with the same bits however tokens are passed.

A token's keys are those of new tokens in the pass over a draft, and slots of the cache
in a pass over a later token. The kernel of attention multiplies and adds both in the
same way, one after the other as the text has them. Norms and activations compute every
row in the same order too; XLA chooses the order of a sum, and which products and sums
are rounded once, by the shape of an array.

So results are the same bits whether a token is decoded alone or verified as a part of a
draft. The difference would be one of the last bit, but products that round their
operand to 8 bits turn it into one of a whole step.

`operations` chooses these functions for layers with such products.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int, Num
from bpd_jax.models.attention import Attended
from bpd_jax.models.cache import BITS
from bpd_jax.models.cpu.attention_kernel import prefix_attention
from bpd_jax.models.cpu.tile import Tile, tile_of_processor
from bpd_jax.models.operations import Before, Operations
from bpd_jax.models.quantized import OneOf, Packed, TiledMatrix, example, operands
from bpd_jax.models.rotary import RotaryConfig, rotate


def ordered_attention(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B U K H"],
    values: Float[Array, "B U K H"],
    mask: Bool[Array, "B T U"] | Bool[Array, "B G T/G U/G"],
    prefix_keys: Num[Array, "B K H S"] | OneOf,
    prefix_values: Num[Array, "B K S H"] | OneOf,
    lengths: Int[Array, " B"],
    first: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
    tile: Tile | None = None,
) -> Float[Array, "B T N H"]:
    """Attends as `attention`, to the first `lengths[b]` slots and to visible new keys.

    The tile, whose width divides H, is by default that of this processor.

    Args:
      queries: not scaled yet.
      keys: of new tokens; a token comes after all new ones that it sees.
      mask: which new keys a token sees, itself among them.
      prefix_keys: of the cache: float32, or the bits of bfloat16 (see `KVCache`), to
        which new keys and values are then rounded, as they will be in the cache.
      first: the first slot that a token sees, int32; None for slot 0.
    """
    from bpd_jax.models.cpu.ordered_attention_code import ordered_module
    from bpd_jax.models.cpu.xla_kernel import register

    tile = tile or tile_of_processor()
    assert tile is not None
    batch, length, num_heads, width = queries.shape
    heads = keys.shape[2]
    group = num_heads // heads
    if mask.ndim == 4:  # Drafts side by side do not see each other.
        alone = jnp.eye(mask.shape[1], dtype=bool)[:, None, :, None]
        mask = (mask[:, :, :, None] & alone).reshape(batch, length, -1)
    folded = queries.reshape(batch, length, heads, group, width).swapaxes(1, 2)
    folded = folded.reshape(batch, heads, -1, width) * width**-0.5
    starts = jnp.zeros((batch, length), jnp.int32) if first is None else first
    half = prefix_keys.dtype == BITS
    if half:
        # A conversion there and back would be removed by XLA.
        keys, values = (jax.lax.reduce_precision(x, 8, 7) for x in (keys, values))
    sizes = (tile.width, tile.outputs, tile.rows, width, softcap or 0.0, int(half))
    name = "_".join(["bpd_jax_ordered_attention", *map(str, sizes)])
    register(name, lambda: ordered_module(tile, width, softcap, half))
    result = jax.ShapeDtypeStruct(folded.shape, jnp.float32)
    mixed = jax.ffi.ffi_call(name, result)(
        folded,
        keys.transpose(0, 2, 3, 1),
        values.swapaxes(1, 2),
        jnp.repeat(mask.astype(jnp.int8), group, axis=1),
        lengths,
        jnp.repeat(starts, group, axis=1),
        *operands(prefix_keys, prefix_values),
    )
    mixed = mixed.reshape(batch, heads, length, group, width).swapaxes(1, 2)
    return mixed.reshape(batch, length, num_heads, width)


def row_norm(
    x: Float[Array, "... D"],
    scale: Float[Array, "..."],
    bias: Float[Array, "..."] | None,
    epsilon: float,
    *,
    centred: bool,
) -> Float[Array, "... D"]:
    """RMS norm over the last axes, those of `scale`; centred: layer norm."""
    from bpd_jax.models.cpu.row_functions_code import norm_module

    rows = x.astype(jnp.float32).reshape(-1, scale.size)
    vectors = [scale.ravel()] if bias is None else [scale.ravel(), bias.ravel()]
    width = _width()
    sizes = (width, len(vectors) - 1, int(centred), epsilon)
    name = "_".join(["bpd_jax_norm", *map(str, sizes)])
    norm = _call(name, lambda: norm_module(*sizes), rows, *vectors)
    return norm.reshape(x.shape)


def row_activation(
    name: str, x: Float[Array, "... F"], gate: Float[Array, "... F"] | None
) -> Float[Array, "... F"]:
    """An activation of x, times the gate if there is one."""
    from bpd_jax.models.cpu.row_functions_code import activation_module

    width = _width()
    arrays = [
        array.reshape(-1, x.shape[-1]) for array in (x, gate) if array is not None
    ]
    gated = len(arrays) == 2
    target = f"bpd_jax_activation_{name}_{width}_{int(gated)}"
    result = _call(target, lambda: activation_module(name, width, gated), *arrays)
    return result.reshape(x.shape)


def _call(name: str, build: Callable[[], Any], rows: Array, *others: Array) -> Array:
    from bpd_jax.models.cpu.xla_kernel import register

    register(name, build)
    result = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    called: Array = jax.ffi.ffi_call(name, result)(rows, *others)
    return called


def _width() -> int:
    tile = tile_of_processor()
    assert tile is not None
    return tile.width


class KernelOperations(Operations):
    """With packed matrices: a kernel reads the cache, where there is one for it."""

    def read(self, queries: Array, to: Before) -> Attended:
        cache = to.cache
        plain = to.window is None and to.softcap is None
        if plain and cache is not None and cache.lengths.ndim == 1:
            arrays = queries, cache.keys[0], cache.values[0], cache.lengths
            attended = prefix_attention(*arrays)
            if attended is not None:
                return attended
        return super().read(queries, to)


class OrderedOperations(KernelOperations):
    """With tiled matrices, whose products round the other operand to 8 bits.

    No number may depend on how many tokens a pass has, not even in its last bit.
    """

    def norm(self, norm: nn.LayerNorm | nn.RMSNorm, x: Array) -> Array:
        params = norm.variables["params"]
        return row_norm(
            x,
            params["scale"],
            params.get("bias"),
            norm.epsilon,
            centred=isinstance(norm, nn.LayerNorm),
        )

    def activation(self, name: str, x: Array, gate: Array | None) -> Array:
        return row_activation(name, x, gate)

    def rotate(self, x: Array, positions: Array, by: RotaryConfig) -> Array:
        return rotate(x, positions, by, rounded=True)

    def add(self, x: Array, scale: float, update: Array) -> Array:
        scaled = scale * update
        # The product is rounded before it is added, for every shape.
        return x + (scaled if scale == 1 else jax.lax.optimization_barrier(scaled))

    def attention(
        self, queries: Array, keys: Array, values: Array, mask: Array, to: Before
    ) -> Array:
        new, cache = (queries, keys, values, mask), to.cache
        if cache is None:
            return super().attention(*new, to)
        first = None if to.window is None else to.positions - to.window + 1
        arrays = *new, cache.keys[0], cache.values[0], cache.lengths
        return ordered_attention(*arrays, first, to.softcap)


_PLAIN, _KERNEL, _ORDERED = Operations(), KernelOperations(), OrderedOperations()


def operations(kernel: Any) -> Operations:
    """The operations of a layer with this kernel, or before the softmax's matrix."""
    rows = kernel.rows if isinstance(kernel, Packed) else kernel
    if isinstance(example(rows), TiledMatrix):
        return _ORDERED
    return _KERNEL if isinstance(kernel, Packed) else _PLAIN
