"""The machine code of `attention_kernel`, as LLVM's intermediate representation.

A tile of queries meets the slots of the cache in groups that fit in registers: their
scores, the exponentials, and the sum of the values so far, rescaled when a greater
score appears (Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax"). Rows of queries do not influence each other.
"""

import functools
import math
from collections.abc import Sequence

from llvmlite import ir

from bpd_jax.models.cpu.llvm_code import (
    FLOAT,
    FLOATS,
    HALF,
    INT,
    POINTER,
    accumulate,
    add_function,
    call_for,
    even_part,
    for_each,
    load_floats,
    reduce_vector,
    smaller,
    whole_parts,
)
from bpd_jax.models.cpu.tile import Tile
from bpd_jax.models.cpu.vector_code import VectorCode
from bpd_jax.models.cpu.xla_kernel import Buffers, Split, kernel_module

_WORD = ir.IntType(32)
_SINGLE = 1 << 15  # A call of fewer products is processed by one thread.


def attention_module(tile: Tile, width: int, half: bool) -> ir.Module:
    """The kernel as LLVM's intermediate representation.

    Arguments of `handler`: queries, keys and values, bfloat16 if `half`, and lengths;
    its results: mixed values, peaks and totals; see `prefix_attention`. A tile is of
    rows of queries and vectors of slots; its width divides `width`, H.
    """
    stored = HALF if half else FLOAT
    kinds = [FLOATS, *[POINTER] * 2, _WORD.as_pointer(), *[FLOATS] * 3, *[INT] * 4]

    def split(b: ir.IRBuilder, buffers: Buffers) -> Split:
        batch, heads, rows = (buffers.size(0, axis) for axis in range(3))
        slots = buffers.size(1, 3)
        tiles = whole_parts(b, rows, tile.rows)
        chunks = b.mul(b.mul(batch, heads), tiles)
        products = b.mul(b.mul(chunks, slots), INT(width))
        return Split(
            values=[*map(buffers.data, range(7), kinds), heads, rows, slots, tiles],
            chunks=chunks,
            alone=b.icmp_signed("<", products, INT(_SINGLE)),
        )

    def run(b: ir.IRBuilder, values: Sequence[ir.Value], chunk: ir.Value) -> None:
        queries, keys, cached, lengths, mixed, peaks, totals = values[:7]
        heads, rows, slots, tiles = values[7:]
        item, index = b.sdiv(chunk, tiles), b.srem(chunk, tiles)
        first, count = even_part(b, index, rows, tiles)
        length = b.load(b.gep(lengths, [b.sdiv(item, heads)]))
        visible = smaller(b, b.sext(length, INT), slots)
        row = b.add(b.mul(item, rows), first)
        begin = b.mul(b.mul(item, slots), INT(width))
        keys, cached = (
            b.gep(b.bitcast(array, stored.as_pointer()), [begin])
            for array in (keys, cached)
        )
        queries, mixed = (
            b.gep(array, [b.mul(row, INT(width))]) for array in (queries, mixed)
        )
        peaks, totals = (b.gep(array, [row]) for array in (peaks, totals))
        arguments = [queries, keys, cached, mixed, peaks, totals, slots, visible]

        def function_of(rows: int) -> ir.Function:
            size = Tile(tile.width, tile.outputs, rows)
            return _Rows(b.module, size, width, stored).function

        call_for(b, count, tile.rows, function_of, arguments)

    return kernel_module("attention_kernel", 4, 3, split, kinds, run, [1, 2])


class _Rows(VectorCode):
    """The function for a fixed number of rows of queries, over all visible slots.

    Its arguments: queries, keys, values, mixed values, peaks, totals, S, and the number
    of visible slots.
    """

    def __init__(self, module: ir.Module, tile: Tile, width: int, stored: ir.Type):
        super().__init__(module, tile, width)
        arrays = [stored.as_pointer()] * 2
        kinds = [FLOATS, *arrays, FLOATS, FLOATS, FLOATS, INT, INT]
        self.function, self.b = add_function(module, f"rows_{tile.rows}", kinds)
        self.queries, self.keys, self.values, self.mixed, peaks, totals, *sizes = (
            self.function.args
        )
        for pointer in self.function.args[:6]:
            pointer.add_attribute("noalias")
        self.slots, self.visible = sizes
        self._emit(peaks, totals)

    def _emit(self, peaks: ir.Value, totals: ir.Value) -> None:
        b, size = self.b, self.tile.width * self.tile.outputs
        kind = ir.ArrayType(FLOAT, self.tile.rows * size)
        self.weights = b.bitcast(b.alloca(kind), FLOATS)
        count = self.tile.rows * self.width
        zero = self._constant(0.0)
        for i in range(0, count, self.tile.width):
            self._store(zero, self.mixed, INT(i))
        state = [FLOAT(-math.inf)] * self.tile.rows + [FLOAT(0.0)] * self.tile.rows
        state = self._by_vectors(self.visible, state, self._group)
        for m in self.rows:
            b.store(state[m], b.gep(peaks, [INT(m)])).align = 4
            total = state[self.tile.rows + m]
            b.store(total, b.gep(totals, [INT(m)])).align = 4
        b.ret_void()

    def _group(
        self, slot: ir.Value, state: list[ir.Value], *, vectors: int, masked: bool
    ) -> list[ir.Value]:
        """Adds some vectors of slots to the state: peaks, then totals."""
        b, wide = self.b, self.tile.width
        mask = self._mask(slot, self.visible) if masked else None
        keys = self.keys, self.slots, slot
        scores = self._scores(self.queries, *keys, vectors, mask)
        if mask is not None:
            least = self._constant(-math.inf)
            scores = [b.select(mask, score, least) for score in scores]
        peaks, totals, scales = [], [], []
        for m in self.rows:
            row = [scores[m * vectors + v] for v in range(vectors)]
            top = functools.reduce(self._greater, row)
            peak = self._greater(state[m], reduce_vector(b, top, self._greater))
            shift = self._spread(peak)
            scale = self._exp(b.fsub(self._spread(state[m]), shift))
            total = self._constant(0.0)
            for v, score in enumerate(row):
                weight = self._exp(b.fsub(score, shift))
                if mask is not None:
                    weight = b.select(mask, weight, self._constant(0.0))
                self._store(weight, self.weights, INT((m * vectors + v) * wide))
                total = b.fadd(total, weight)
            first = b.extract_element(scale, _WORD(0))
            total = reduce_vector(b, total, b.fadd)
            before = b.fmul(state[self.tile.rows + m], first)
            peaks.append(peak)
            totals.append(b.fadd(before, total))
            scales.append(scale)
        count = b.sub(self.visible, slot) if masked else INT(vectors * wide)
        self._mix(slot, scales, vectors * wide, count)
        return peaks + totals

    def _mix(
        self, slot: ir.Value, scales: list[ir.Value], stride: int, count: ir.Value
    ) -> None:
        b, wide = self.b, self.tile.width
        most = self.width // wide
        vectors = math.gcd(most, self.tile.outputs)

        def part(first: ir.Value) -> None:
            places = [
                (m, b.add(first, INT(m * self.width + v * wide)))
                for m in self.rows
                for v in range(vectors)
            ]

            def one(j: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                start = b.add(b.mul(b.add(slot, j), INT(self.width)), first)

                def weight(m: int) -> ir.Value:
                    return b.gep(self.weights, [b.add(j, INT(m * stride))])

                return self._add_products(self.values, start, sums, weight)

            before = [
                b.fmul(load_floats(b, b.gep(self.mixed, [place]), wide), scales[m])
                for m, place in places
            ]
            _, sums = accumulate(b, INT(0), count, 1, before, one)
            for (_, place), value in zip(places, sums, strict=True):
                self._store(value, self.mixed, place)

        for_each(b, INT(0), INT(self.width), vectors * wide, part)
