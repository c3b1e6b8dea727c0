"""The host's memory, reused by programs that need the same large arrays at every step.

The GNU C library returns arrays of 32 MB or more to the kernel when they are freed, and
the kernel clears every page of the next one again, which takes a large part of the time
of training on a CPU. With the clock that a program reads while it runs.
"""

import ctypes
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Num, UInt
from bpd_jax.cpu.device import kernel_name, on_cpu
from bpd_jax.cpu.tile import tile_of_processor

# Parameters of `mallopt`, from <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
# Device files of NVIDIA and AMD GPUs and of TPUs.
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "accel*", "vfio/[0-9]*")
_PAD = 256 * 2**20  # bytes
# With more, the threads would wait for one another whenever they allocate.
_FEW_CORES = 16


def keep_freed_memory() -> None:
    """Keeps freed arrays in this process for reuse, from now on.

    Call it before jax starts its threads; later it has little effect. The process then
    keeps at least as much memory as it has ever used at once. Does nothing with other C
    libraries, if a variable of the allocator, such as `MALLOC_ARENA_MAX`, is set, or if
    there is a device file of an accelerator and `JAX_PLATFORMS` is not `cpu`.

    Source: mallopt(3) of the Linux manual.
    """
    if os.environ.get("JAX_PLATFORMS") != "cpu" and _sees_accelerator():
        return
    if any(n.startswith(("MALLOC_", "GLIBC_TUNABLES")) for n in os.environ):
        return
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    library.mallopt(_TRIM_THRESHOLD, -1)  # never
    library.mallopt(_TOP_PAD, _PAD)
    library.mallopt(_MMAP_MAX, 0)
    if (os.cpu_count() or 1) <= _FEW_CORES:
        # All threads share the arrays that any of them has freed.
        library.mallopt(_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Returns freed memory to the kernel, which the GNU C library keeps for reuse.

    Loading a model, compiling a program, or reading one, frees a few hundred MB.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _sees_accelerator(devices: pathlib.Path = pathlib.Path("/dev")) -> bool:
    """Whether there is a device file of a GPU or TPU. Asking jax starts its threads."""
    return any(next(devices.glob(name), None) for name in _DEVICE_FILES)


def microseconds(after: Num[Array, "..."]) -> UInt[Array, ""] | None:
    """The time of a steady clock once `after` is known, in microseconds modulo 2^32.

    None where programs cannot read one.
    """
    clock = getattr(time, "CLOCK_MONOTONIC", None)
    if clock is None or not on_cpu() or tile_of_processor() is None:
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
