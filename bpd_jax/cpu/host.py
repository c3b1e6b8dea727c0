"""The clock that a program reads while it runs."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Num, UInt
from bpd_jax.cpu.device import kernel_name
from bpd_jax.cpu.tile import tile_of_processor


def microseconds(after: Num[Array, "..."]) -> UInt[Array, ""] | None:
    """The time of a steady clock once `after` is known, in microseconds modulo 2^32.

    None where programs cannot read one.
    """
    clock = getattr(time, "CLOCK_MONOTONIC", None)
    if clock is None or tile_of_processor() is None:
        return None
    from bpd_jax.cpu.xla_kernel import register

    name = kernel_name("clock", clock)
    register(name, lambda: _clock_module(clock))
    result = jax.ShapeDtypeStruct((1,), jnp.uint32)
    return jax.ffi.ffi_call(name, result, has_side_effect=True)(after)[0]


def _clock_module(clock: int) -> Any:
    """A kernel with any argument, whose result is `[1]`, microseconds.

    `clock` is its number in the C library.
    """
    # Imported late: other devices do not need LLVM.
    from llvmlite import ir

    from bpd_jax.cpu.llvm_code import INT, POINTER, intrinsic
    from bpd_jax.cpu.xla_kernel import Buffers, Split, kernel_module

    word = ir.IntType(32)
    words = word.as_pointer()

    def split(b: ir.IRBuilder, buffers: Buffers) -> Split:
        result = buffers.data(1, words)
        return Split(values=[result], chunks=INT(1), alone=ir.IntType(1)(1))

    def run(b: ir.IRBuilder, values: Sequence[ir.Value], chunk: ir.Value) -> None:
        del chunk
        # A `timespec`: seconds and nanoseconds.
        read = b.alloca(ir.ArrayType(INT, 2))
        kinds = [word, POINTER]
        gettime = intrinsic(b.module, "clock_gettime", word, kinds)
        b.call(gettime, [word(clock), b.bitcast(read, POINTER)])
        parts = b.bitcast(read, INT.as_pointer())
        seconds, nanoseconds = (b.load(b.gep(parts, [INT(i)])) for i in range(2))
        total = b.add(b.mul(seconds, INT(10**6)), b.sdiv(nanoseconds, INT(10**3)))
        b.store(b.trunc(total, word), values[0])

    return kernel_module("clock", 1, 1, split, [words], run)
