"""Vectors of float32 in a function of attention, in LLVM's representation."""

import functools
import math
from collections.abc import Callable

from llvmlite import ir

from bpd_jax.cpu.llvm_code import (
    FLOAT,
    HALF,
    INT,
    Repeated,
    accumulate,
    fused,
    intrinsic,
    load_floats,
    splat,
    widened,
)
from bpd_jax.cpu.tile import Tile

_WORD = ir.IntType(32)

# exp(x) = 2^n exp(r) with n = round(x / ln 2): r = x - n ln 2, where ln 2 is the sum of
# two numbers of which the first has few bits; the Taylor polynomial of exp(r) to r^7 is
# exact to float32 for |r| <= ln(2) / 2. Adding and subtracting 1.5 * 2^23 rounds, and
# leaves n in the low bits.
_ROUND, _LN2 = 1.5 * 2.0**23, (0.693359375, math.log(2) - 0.693359375)
_LEAST = -87.0  # Arguments are clipped to this: exp is near the least normal number.


class VectorCode:
    """What is done with vectors; a subclass sets the builder."""

    b: ir.IRBuilder

    def __init__(self, module: ir.Module, tile: Tile, width: int) -> None:
        self.tile, self.width = tile, width
        self.module, self.rows = module, range(tile.rows)
        self.vector = ir.VectorType(FLOAT, tile.width)

    def _exp(self, x: ir.Value) -> ir.Value:
        """The exponential of numbers of at most 0, which may be -inf."""
        b, number = self.b, self._constant
        x = b.select(b.fcmp_ordered("<", x, number(_LEAST)), number(_LEAST), x)
        shifted = self._fma(x, number(1 / math.log(2)), number(_ROUND))
        n = b.fsub(shifted, number(_ROUND))
        for part in _LN2:
            x = self._fma(n, number(-part), x)
        result = number(1 / math.factorial(7))
        for power in reversed(range(7)):
            result = self._fma(result, x, number(1 / math.factorial(power)))
        words = ir.VectorType(_WORD, self.tile.width)
        exponent = b.add(b.bitcast(shifted, words), Repeated(words, 127))
        scale = b.bitcast(b.shl(exponent, Repeated(words, 23)), self.vector)
        return b.fmul(result, scale)

    def _by_vectors(
        self,
        begin: ir.Value,
        size: ir.Value,
        state: list[ir.Value],
        group: Callable[..., list[ir.Value]],
    ) -> list[ir.Value]:
        """Accumulates numbers from `begin` to `size` by groups of vectors.

        `group` gets the first number, the state, `vectors`, and whether it is `masked`.
        """
        b, at = self.b, begin
        for vectors in sorted({self.tile.outputs, 1}, reverse=True):
            whole = functools.partial(group, vectors=vectors, masked=False)
            step = vectors * self.tile.width
            at, state = accumulate(b, at, size, step, state, whole)
        # What remains, less than a vector, is one iteration of a loop.
        left = b.icmp_signed("<", at, size)
        stop = b.select(left, b.add(at, INT(1)), at)
        rest = functools.partial(group, vectors=1, masked=True)
        return accumulate(b, at, stop, 1, state, rest)[1]

    def _mask(self, first: ir.Value, size: ir.Value) -> ir.Value:
        """Mask of the numbers below `size` in a vector of numbers from `first` on."""
        words = ir.VectorType(_WORD, self.tile.width)
        left = self.b.trunc(self.b.sub(size, first), _WORD)
        lanes = ir.Constant(words, list(range(self.tile.width)))
        return self.b.icmp_signed("<", lanes, self._spread(left))

    def _load(
        self, array: ir.Value, at: ir.Value, mask: ir.Value | None = None
    ) -> ir.Value:
        """A vector of keys or values, in float32; what is masked is not read."""
        b, wide = self.b, self.tile.width
        place = b.gep(array, [at])
        if mask is None:
            return load_floats(b, place, wide)
        half = place.type.pointee is HALF
        nothing = Repeated(ir.VectorType(place.type.pointee, wide), 0 if half else 0.0)
        suffix = "i16" if half else "f32"
        return widened(b, self._masked(place, suffix, 2 if half else 4, mask, nothing))

    def _masked(
        self, place: ir.Value, suffix: str, size: int, mask: ir.Value, rest: ir.Value
    ) -> ir.Value:
        """A vector of numbers of `size` bytes; what is masked is that of `rest`."""
        kind, wide = rest.type, self.tile.width
        kinds = [kind.as_pointer(), _WORD, ir.VectorType(ir.IntType(1), wide), kind]
        name = f"llvm.masked.load.v{wide}{suffix}.p0"
        load = intrinsic(self.module, name, kind, kinds)
        place = self.b.bitcast(place, kind.as_pointer())
        return self.b.call(load, [place, _WORD(size), mask, rest])

    def _add_products(
        self,
        array: ir.Value,
        start: ir.Value,
        sums: list[ir.Value],
        factor_of: Callable[[int], ir.Value],
        mask: ir.Value | None = None,
    ) -> list[ir.Value]:
        """Adds vectors from `start` on times a number of each row, to sums by row."""
        b, vectors = self.b, len(sums) // len(self.rows)
        loaded = [
            self._load(array, b.add(start, INT(v * self.tile.width)), mask)
            for v in range(vectors)
        ]
        added = []
        for m in self.rows:
            factor = self._spread(b.load(factor_of(m)))
            for v, vector in enumerate(loaded):
                added.append(self._fma(factor, vector, sums[m * vectors + v]))
        return added

    def _scores(
        self,
        queries: ir.Value,
        keys: ir.Value,
        stride: ir.Value,
        first: ir.Value,
        vectors: int,
        mask: ir.Value | None,
    ) -> list[ir.Value]:
        """Products of queries with vectors of keys; features are a stride apart."""
        b = self.b

        def query(h: ir.Value, m: int) -> ir.Value:
            return b.gep(queries, [b.add(h, INT(m * self.width))])

        def feature(h: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            start = b.add(b.mul(h, stride), first)
            return self._add_products(keys, start, sums, lambda m: query(h, m), mask)

        zeros = [self._constant(0.0)] * (self.tile.rows * vectors)
        return accumulate(b, INT(0), INT(self.width), 1, zeros, feature)[1]

    def _store(self, vector: ir.Value, array: ir.Value, at: ir.Value) -> None:
        place = self.b.bitcast(self.b.gep(array, [at]), self.vector.as_pointer())
        self.b.store(vector, place).align = 4

    def _fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self.b.call(fused(self.module, self.tile.width), [x, y, z])

    def _greater(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def _constant(self, value: float) -> Repeated:
        return Repeated(self.vector, value)

    def _spread(self, number: ir.Value) -> ir.Value:
        return splat(self.b, number, self.tile.width)
