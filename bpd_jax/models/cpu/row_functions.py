"""Norms and activations of rows, whose results do not depend on the number of rows.

XLA chooses the order of a sum, and which products and sums are rounded once, by the
shape of an array. The difference is one of the last bit, but products that round their
operand to 8 bits turn it into one of a whole step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float
from bpd_jax.models.cpu.tile import tile_of_processor


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
