"""A clock that a program on a CPU reads while it runs."""

import time

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Num, UInt
from bpd_jax.models.cpu.device import on_cpu
from bpd_jax.models.cpu.tile import tile_of_processor


def microseconds(after: Num[Array, "..."]) -> UInt[Array, ""] | None:
    """The time of a steady clock once `after` is known, in microseconds modulo 2^32.

    None where programs cannot read one.
    """
    clock = getattr(time, "CLOCK_MONOTONIC", None)
    if clock is None or not on_cpu() or tile_of_processor() is None:
        return None
    from bpd_jax.models.cpu.clock_code import clock_module
    from bpd_jax.models.cpu.xla_kernel import register

    name = f"bpd_jax_clock_{clock}"
    register(name, lambda: clock_module(clock))
    result = jax.ShapeDtypeStruct((1,), jnp.uint32)
    return jax.ffi.ffi_call(name, result, has_side_effect=True)(after)[0]
