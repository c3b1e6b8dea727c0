"""The machine code of norms and activations, as LLVM's intermediate representation."""

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from bpd_jax.cpu.llvm_code import (
    FLOAT,
    FLOATS,
    INT,
    Repeated,
    accumulate,
    chunk_of,
    for_each,
    intrinsic,
    reduce_vector,
    whole_parts,
)
from bpd_jax.cpu.tile import Tile
from bpd_jax.cpu.vector_code import VectorCode
from bpd_jax.cpu.xla_kernel import Buffers, Split, kernel_module

_CHUNK = 1 << 14  # Numbers of the rows in a chunk.
_WORD = ir.IntType(32)


def _rows_module(
    name: str,
    inputs: int,
    vectors: int,
    width: int,
    row: Callable[["_Row"], None],
) -> ir.Module:
    """A kernel of rows; the last `vectors` of its arguments are shared by all rows."""
    kinds = [FLOATS] * (inputs + 1)

    def split(b: ir.IRBuilder, buffers: Buffers) -> Split:
        rows, length = buffers.size(0, 0), buffers.size(0, 1)
        size = b.add(b.sdiv(INT(_CHUNK), length), INT(1))
        chunks = whole_parts(b, rows, size)
        arrays = map(buffers.data, range(inputs + 1), kinds)
        return Split(
            values=[*arrays, rows, length, size],
            chunks=chunks,
            alone=b.icmp_signed("<=", chunks, INT(1)),
        )

    def run(b: ir.IRBuilder, values: Sequence[ir.Value], chunk: ir.Value) -> None:
        *arrays, rows, length, size = values
        first, last = chunk_of(b, chunk, size, rows)

        def each(m: ir.Value) -> None:
            start = b.mul(m, length)
            shared = range(inputs - vectors, inputs)
            places = [
                array if i in shared else b.gep(array, [start])
                for i, array in enumerate(arrays)
            ]
            row(_Row(b, width, places, length))

        for_each(b, first, last, 1, each)

    return kernel_module(name, inputs, 1, split, [*kinds, *[INT] * 3], run)


class _Row(VectorCode):
    """A row of each array, whose length is a multiple of the width."""

    def __init__(
        self,
        b: ir.IRBuilder,
        width: int,
        arrays: Sequence[ir.Value],
        length: ir.Value,
    ) -> None:
        super().__init__(b.module, Tile(width, 1, 1), width)
        self.b, self.length = b, length
        *self.inputs, self.result = arrays

    def write(self, value: Callable[[list[ir.Value]], ir.Value]) -> None:
        def each(at: ir.Value) -> None:
            loaded = [self._load(array, at) for array in self.inputs]
            self._store(value(loaded), self.result, at)

        for_each(self.b, INT(0), self.length, self.tile.width, each)

    def mean(self, value: Callable[[ir.Value], ir.Value]) -> ir.Value:
        """The mean of a function of the first argument."""
        b = self.b

        def each(at: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            return [b.fadd(sums[0], value(self._load(self.inputs[0], at)))]

        zero = [self._constant(0.0)]
        wide = self.tile.width
        _, sums = accumulate(b, INT(0), self.length, wide, zero, each)
        total = reduce_vector(b, sums[0], b.fadd)
        return b.fdiv(total, b.sitofp(self.length, FLOAT))

    def times(self, *factors: ir.Value) -> ir.Value:
        first, *others = factors
        for other in others:
            first = self.b.fmul(first, other)
        return first

    def gelu(self, x: ir.Value) -> ir.Value:
        """Hendrycks and Gimpel 2016, with tanh: x · sigmoid(2u)."""
        cube = self.times(x, x, x)
        inner = self._fma(cube, self._constant(0.044715), x)
        twice = self._constant(2 * math.sqrt(2 / math.pi))
        return self.b.fmul(x, self._sigmoid(self.b.fmul(twice, inner)))

    def silu(self, x: ir.Value) -> ir.Value:
        return self.b.fmul(x, self._sigmoid(x))

    def relu(self, x: ir.Value) -> ir.Value:
        return self._greater(x, self._constant(0.0))

    def gelu_exact(self, x: ir.Value) -> ir.Value:
        """`x · Φ(x)`, by equation 7.1.26 of Abramowitz and Stegun 1964."""
        b, number = self.b, self._constant
        z = b.fmul(self._size(x), number(math.sqrt(0.5)))
        t = b.fdiv(number(1.0), self._fma(number(0.3275911), z, number(1.0)))
        terms = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
        series = number(terms[0])
        for term in terms[1:]:
            series = self._fma(series, t, number(term))
        tail = self.times(number(0.5), series, t, self._exp(b.fneg(b.fmul(z, z))))
        positive = b.fcmp_ordered(">=", x, number(0.0))
        share = b.select(positive, b.fsub(number(1.0), tail), tail)
        return b.fmul(x, share)

    def _size(self, x: ir.Value) -> ir.Value:
        words = ir.VectorType(_WORD, self.tile.width)
        bits = Repeated(words, 0x7FFFFFFF)
        return self.b.bitcast(self.b.and_(self.b.bitcast(x, words), bits), self.vector)

    def _sigmoid(self, x: ir.Value) -> ir.Value:
        b, one = self.b, self._constant(1.0)
        power = self._exp(b.fneg(self._size(x)))
        positive = b.fcmp_ordered(">=", x, self._constant(0.0))
        return b.fdiv(b.select(positive, one, power), b.fadd(one, power))


def norm_module(width: int, bias: int, centred: int, epsilon: float) -> ir.Module:
    """The kernel of `row_norm`: rows, scale and, if `bias` is 1, a bias."""

    def row(row: _Row) -> None:
        b = row.b
        mean = row.mean(lambda x: x) if centred else FLOAT(0.0)
        mean = row._spread(mean)

        def square(x: ir.Value) -> ir.Value:
            x = b.fsub(x, mean)
            return b.fmul(x, x)

        root = intrinsic(b.module, "llvm.sqrt.f32", FLOAT, [FLOAT])
        spread = b.call(root, [b.fadd(row.mean(square), FLOAT(epsilon))])
        factor = row._spread(b.fdiv(FLOAT(1.0), spread))

        def value(vectors: list[ir.Value]) -> ir.Value:
            x, scale, *added = vectors
            x = row.times(b.fsub(x, mean), factor, scale)
            return b.fadd(x, added[0]) if added else x

        row.write(value)

    return _rows_module("norm", 2 + bias, 1 + bias, width, row)


def activation_module(name: str, width: int, gated: bool) -> ir.Module:
    """The kernel of `row_activation`: rows, and their gates if there are any."""

    def row(row: _Row) -> None:
        def value(vectors: list[ir.Value]) -> ir.Value:
            x, *gate = vectors
            return row.times(getattr(row, name)(x), *gate)

        row.write(value)

    return _rows_module("activation", 1 + gated, 0, width, row)
