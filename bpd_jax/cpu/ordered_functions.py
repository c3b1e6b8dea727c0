"""Norms and activations with the same bits however many tokens a pass has.

Every row is computed in the same order; XLA chooses the order of a sum, and which
products and sums are rounded once, by the shape of an array. The difference would be
one of the last bit, which may decide between two nearly equal tokens; products that
round their operand to 8 bits turn it into one of a whole step.

`operations` chooses these functions for layers whose matrices a kernel multiplies.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float
from bpd_jax.cpu.attention_kernel import ordered_attention, reads
from bpd_jax.cpu.device import kernel_name
from bpd_jax.cpu.products import KernelPacked
from bpd_jax.cpu.tile import tile_of_processor
from bpd_jax.models.device_ops import Before, Operations
from bpd_jax.models.rotary import RotaryConfig, rotate


def row_norm(
    x: Float[Array, "... D"],
    scale: Float[Array, "..."],
    bias: Float[Array, "..."] | None,
    epsilon: float,
    *,
    centred: bool,
) -> Float[Array, "... D"]:
    """RMS norm over the last axes, those of `scale`; centred: layer norm."""
    from bpd_jax.cpu.row_functions_code import norm_module

    rows = x.astype(jnp.float32).reshape(-1, scale.size)
    vectors = [
        vector.ravel().astype(jnp.float32)
        for vector in (scale, bias)
        if vector is not None
    ]
    width = _width()
    sizes = (width, len(vectors) - 1, int(centred), epsilon)
    name = kernel_name("norm", *sizes)
    norm = _call(name, lambda: norm_module(*sizes), rows, *vectors)
    return norm.reshape(x.shape)


def row_activation(
    name: str, x: Float[Array, "... F"], gate: Float[Array, "... F"] | None
) -> Float[Array, "... F"]:
    """An activation of x, times the gate if there is one."""
    from bpd_jax.cpu.row_functions_code import activation_module

    width = _width()
    arrays = [
        array.reshape(-1, x.shape[-1]) for array in (x, gate) if array is not None
    ]
    gated = len(arrays) == 2
    target = kernel_name("activation", name, width, int(gated))
    result = _call(target, lambda: activation_module(name, width, gated), *arrays)
    return result.reshape(x.shape)


def _call(name: str, build: Callable[[], Any], rows: Array, *others: Array) -> Array:
    from bpd_jax.cpu.xla_kernel import register

    register(name, build)
    result = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    called: Array = jax.ffi.ffi_call(name, result)(rows, *others)
    return called


def _width() -> int:
    tile = tile_of_processor()
    assert tile is not None
    return tile.width


class KernelAttention(Operations):
    """A kernel of attention, for the caches that it reads."""

    def attention(
        self, queries: Array, keys: Array, values: Array, mask: Array, to: Before
    ) -> Array:
        new, cache = (queries, keys, values, mask), to.cache
        # Lengths are a mask in a training pass.
        if cache is None or cache.lengths.ndim > 1:
            return super().attention(*new, to)
        arrays = *new, cache.keys[0], cache.values[0]
        if not reads(*arrays[-2:]):
            return super().attention(*new, to)
        first = None if to.window is None else to.positions - to.window + 1
        return ordered_attention(*arrays, cache.lengths, first, to.softcap)


class OrderedOperations(KernelAttention):
    """In float32: no number depends on how many tokens a pass has, to the last bit.

    Rows that are no whole vectors, which the kernels do not take, are left to XLA.
    """

    def norm(self, norm: nn.LayerNorm | nn.RMSNorm, x: Array) -> Array:
        params = norm.variables["params"]
        if params["scale"].size % _width():  # A kernel takes whole vectors.
            return super().norm(norm, x)
        return row_norm(
            x,
            params["scale"],
            params.get("bias"),
            norm.epsilon,
            centred=isinstance(norm, nn.LayerNorm),
        )

    def activation(self, name: str, x: Array, gate: Array | None) -> Array:
        if x.shape[-1] % _width():
            return super().activation(name, x, gate)
        return row_activation(name, x, gate)

    def rotate(self, x: Array, positions: Array, by: RotaryConfig) -> Array:
        return rotate(x, positions, by, rounded=True)

    def add(self, x: Array, scale: float, update: Array) -> Array:
        scaled = scale * update
        # The product is rounded before it is added, for every shape.
        return x + (scaled if scale == 1 else jax.lax.optimization_barrier(scaled))


_PLAIN, _ATTENTION, _ORDERED = Operations(), KernelAttention(), OrderedOperations()


def operations(kernel: Any, dtype: str) -> Operations:
    """Kernels where a kernel multiplies; see `DeviceOps.operations`."""
    if not (isinstance(kernel, KernelPacked) and tile_of_processor()):
        return _PLAIN
    return _ORDERED if dtype == "float32" else _ATTENTION
