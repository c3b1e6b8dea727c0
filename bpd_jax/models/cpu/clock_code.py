"""The machine code of `clock`, as LLVM's intermediate representation."""

from collections.abc import Sequence

from llvmlite import ir

from bpd_jax.models.cpu.llvm_code import INT, POINTER, intrinsic
from bpd_jax.models.cpu.xla_kernel import Buffers, Split, kernel_module

_WORD = ir.IntType(32)
_WORDS = _WORD.as_pointer()


def clock_module(clock: int) -> ir.Module:
    """A kernel with any argument, whose result is `[1]`, microseconds.

    `clock` is its number in the C library.
    """

    def split(b: ir.IRBuilder, buffers: Buffers) -> Split:
        result = buffers.data(1, _WORDS)
        return Split(values=[result], chunks=INT(1), alone=ir.IntType(1)(1))

    def run(b: ir.IRBuilder, values: Sequence[ir.Value], chunk: ir.Value) -> None:
        del chunk
        # A `timespec`: seconds and nanoseconds.
        read = b.alloca(ir.ArrayType(INT, 2))
        kinds = [_WORD, POINTER]
        gettime = intrinsic(b.module, "clock_gettime", _WORD, kinds)
        b.call(gettime, [_WORD(clock), b.bitcast(read, POINTER)])
        parts = b.bitcast(read, INT.as_pointer())
        seconds, nanoseconds = (b.load(b.gep(parts, [INT(i)])) for i in range(2))
        total = b.add(b.mul(seconds, INT(10**6)), b.sdiv(nanoseconds, INT(10**3)))
        b.store(b.trunc(total, _WORD), values[0])

    return kernel_module("clock", 1, 1, split, [_WORDS], run)
