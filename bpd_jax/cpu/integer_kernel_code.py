"""The machine code of `integer_kernel`, as LLVM's intermediate representation.

Threads round the rows of x, then multiply them with groups of W outputs.
"""

import functools
from collections.abc import Sequence

from llvmlite import ir

from bpd_jax.cpu.llvm_code import (
    FLOAT,
    FLOATS,
    INT,
    POINTER,
    Repeated,
    add_function,
    call_for,
    chunk_of,
    even_part,
    for_each,
    fused,
    intrinsic,
    reduce_vector,
    splat,
    whole_parts,
)
from bpd_jax.cpu.tile import ARM
from bpd_jax.cpu.xla_kernel import Buffers, Split, kernel_module

_WORD, _SHORT = ir.IntType(32), ir.IntType(16)
_WORDS = _WORD.as_pointer()

# Rows that are multiplied with a group of outputs at once: each has two registers.
_ROWS = {16: 8, 8: 6, ARM: 8}

_CHUNK = 1 << 16  # Numbers of the matrix in a chunk.
_ROUNDED = 8  # Rows that are rounded in a chunk.
_SINGLE = 1 << 17  # A call of fewer products is processed by one thread.
_LINE = 64  # Bytes of a cache line.

# Adding 1.5 · 2^23 leaves the rounded number in the low bits.
_ROUND = 1.5 * 2.0**23
_LARGEST = 127


def splits(width: int, bits: int) -> bool:
    """Whether rounded numbers take 16 bits: AVX2 multiplies 8 bits by 8 only so."""
    return width == 8 and bits == 8


def words_of_block(width: int, bits: int, block: int) -> int:
    """Words of a block of a rounded row: integers, their scale, and their sum."""
    return block // (2 if splits(width, bits) else 4) + 2


def integer_module(
    width: int, bits: int, block: int, offset: int, minima: int
) -> ir.Module:
    """The kernel as LLVM's intermediate representation.

    Its arguments are x `[M, K]` and `TiledMatrix.words`, of which the sizes are; its
    results the products and the rounded rows.
    """
    code = _Code(width, bits, block, offset, bool(minima))

    def split(b: ir.IRBuilder, buffers: Buffers) -> Split:
        rows, length = buffers.size(0, 0), buffers.size(0, 1)
        groups, blocks = buffers.size(1, 0), buffers.size(1, 1)
        x, matrix, y, rounded = map(buffers.data, range(4), kinds)
        before = whole_parts(b, rows, _ROUNDED)
        size = b.sdiv(INT(_CHUNK), b.mul(length, INT(width)))
        size = b.select(b.icmp_signed("<", size, INT(1)), INT(1), size)
        products = b.mul(b.mul(rows, length), b.mul(groups, INT(width)))
        return Split(
            values=[
                *(x, matrix, y, rounded),
                *(rows, length, blocks, groups, buffers.size(2, 1), size, before),
            ],
            chunks=b.add(before, whole_parts(b, groups, size)),
            alone=b.icmp_signed("<", products, INT(_SINGLE)),
            before=before,
        )

    def run(b: ir.IRBuilder, values: Sequence[ir.Value], chunk: ir.Value) -> None:
        x, matrix, y, rounded, *numbers = values
        rows, length, blocks, groups, outputs, size, before = numbers
        with b.if_then(b.icmp_signed("<", chunk, before)):
            stride = b.mul(blocks, INT(code.rounded))
            rounding = code.rounding(b.module)

            def rounds(m: ir.Value) -> None:
                source = b.gep(x, [b.mul(m, length)])
                b.call(rounding, [source, b.gep(rounded, [b.mul(m, stride)]), blocks])

            begin, end = chunk_of(b, chunk, INT(_ROUNDED), rows)
            for_each(b, begin, end, 1, rounds)
            b.ret_void()
        first, last = chunk_of(b, b.sub(chunk, before), size, groups)
        of_group = b.mul(blocks, INT(code.words * width))

        def each(group: ir.Value) -> None:
            o = b.mul(group, INT(width))
            operands = [b.gep(matrix, [b.mul(group, of_group)]), b.gep(y, [o])]
            code.multiply(
                b, [*operands, rounded], rows, blocks, outputs, b.sub(outputs, o)
            )

        for_each(b, first, last, 1, each)

    kinds = [FLOATS, _WORDS, FLOATS, _WORDS, *[INT] * 7]
    return kernel_module("integer_kernel", 2, 2, split, kinds, run, [1])


class _Code:
    """The functions of a kind of matrix."""

    def __init__(self, width: int, bits: int, block: int, offset: int, minima: bool):
        self.width, self.bits, self.block = width, bits, block
        self.offset, self.minima = offset, minima
        self.splits = splits(width, bits)
        self.floats = ir.VectorType(FLOAT, width)
        self.integers = ir.VectorType(_WORD, width)
        # Words of an output and a block, and of a row and a block.
        self.words = block * bits // 32 + 1 + minima
        self.rounded = words_of_block(width, bits, block)

    def rounding(self, module: ir.Module) -> ir.Function:
        """Rounds a row. Arguments: x, the rounded row, the number of blocks."""
        function, b = add_function(module, "rounding", [FLOATS, _WORDS, INT])
        x, rounded, blocks = function.args
        signs = Repeated(self.integers, 0x7FFFFFFF)
        bytes_ = ir.VectorType(ir.IntType(8), self.width)
        whole = self._number(_ROUND)

        def greater(one: ir.Value, other: ir.Value) -> ir.Value:
            return b.select(b.fcmp_ordered(">", one, other), one, other)

        def each(index: ir.Value) -> None:
            source = b.gep(x, [b.mul(index, INT(self.block))])
            to = b.gep(rounded, [b.mul(index, INT(self.rounded))])
            places = range(0, self.block, self.width)
            vectors = [self._load(b, source, place, self.floats) for place in places]
            sizes = [
                b.bitcast(b.and_(b.bitcast(v, self.integers), signs), self.floats)
                for v in vectors
            ]
            largest = reduce_vector(b, functools.reduce(greater, sizes), greater)
            scale = b.fdiv(largest, FLOAT(_LARGEST))
            inverse = b.fdiv(FLOAT(_LARGEST), largest)
            finite = b.fcmp_ordered("<", inverse, FLOAT(float("inf")))
            inverse = splat(b, b.select(finite, inverse, FLOAT(0.0)), self.width)
            total = Repeated(self.integers, 0)
            for place, vector in zip(places, vectors, strict=True):
                shifted = b.fadd(b.fmul(vector, inverse), whole)
                integers = b.sub(
                    b.bitcast(shifted, self.integers), b.bitcast(whole, self.integers)
                )
                total = b.add(total, integers)
                at = b.gep(to, [INT(place // (2 if self.splits else 4))])
                if self.splits:
                    # Of four numbers the first and the third are a word.
                    pairs = b.trunc(integers, ir.VectorType(_SHORT, self.width))
                    order = [i ^ (i % 4 in (1, 2)) * 3 for i in range(self.width)]
                    mask = ir.Constant(self.integers, order)
                    bytes_of = b.shuffle_vector(pairs, pairs, mask)
                else:
                    bytes_of = b.trunc(integers, bytes_)
                at = b.bitcast(at, bytes_of.type.as_pointer())
                b.store(bytes_of, at).align = 4
            added = reduce_vector(b, total, b.add)
            after = b.gep(to, [INT(self.rounded - 2)])
            b.store(b.bitcast(scale, _WORD), after)
            if self.offset:
                added = b.mul(added, _WORD(-self.offset))
            else:
                added = b.bitcast(b.fmul(b.sitofp(added, FLOAT), scale), _WORD)
            b.store(added, b.gep(after, [INT(1)]))

        for_each(b, INT(0), blocks, 1, each)
        b.ret_void()
        return function

    def multiply(
        self,
        b: ir.IRBuilder,
        operands: Sequence[ir.Value],
        rows: ir.Value,
        blocks: ir.Value,
        outputs: ir.Value,
        left: ir.Value,
    ) -> None:
        """All rows times a group of outputs, of which the first `left` exist."""
        matrix, y, rounded = operands
        most = _ROWS[self.width]
        tiles = whole_parts(b, rows, most)
        stride = b.mul(blocks, INT(self.rounded))

        def each(index: ir.Value) -> None:
            m, count = even_part(b, index, rows, tiles)
            of_x = b.gep(rounded, [b.mul(m, stride)])
            of_y = b.gep(y, [b.mul(m, outputs)])
            arguments = [matrix, of_y, of_x, blocks, outputs, left, tiles, index]
            tile = functools.partial(self._tile, b.module)
            call_for(b, count, most, tile, arguments)

        for_each(b, INT(0), tiles, 1, each)

    def _tile(self, module: ir.Module, rows: int) -> ir.Function:
        """Some rows times a group of outputs, added once.

        Arguments: the group, y, the rounded rows, blocks, outputs, `left`, the number
        of tiles and the index of this one, which fetches its part of the next group
        into the cache.
        """
        name = f"tile_{rows}"
        if name in module.globals:
            return module.globals[name]
        kinds = [_WORDS, FLOATS, _WORDS, *[INT] * 5]
        function, b = add_function(module, name, kinds)
        matrix, y, rounded, blocks, outputs, left, tiles, tile = function.args
        for pointer in (matrix, y, rounded):
            pointer.add_attribute("noalias")
        fma = fused(module, self.width)
        kinds = [POINTER, *[_WORD] * 3]
        prefetch = intrinsic(module, "llvm.prefetch", ir.VoidType(), kinds)
        size, of_row = self.words * self.width, self.rounded
        stride = b.mul(blocks, INT(of_row))
        entry, loop = b.block, function.append_basic_block("loop")
        done = function.append_basic_block("done")
        # Where this tile begins to fetch, and the bytes of a step.
        part = b.sdiv(b.mul(blocks, INT(4 * size)), tiles)
        behind = b.gep(matrix, [b.mul(blocks, INT(size))])
        behind = b.gep(b.bitcast(behind, POINTER), [b.mul(tile, part)])
        step = b.sdiv(INT(4 * size), tiles)
        b.branch(loop)
        b.position_at_end(loop)
        index = b.phi(INT)
        sums = [b.phi(self.floats) for _ in range(rows)]
        at = b.gep(matrix, [b.mul(index, INT(size))])
        later = b.gep(behind, [b.mul(index, step)])
        numbers = [_WORD(number) for number in (0, 2, 1)]

        def fetch(offset: ir.Value) -> None:
            # Arguments: a read; into the second-level cache; of data.
            b.call(prefetch, [b.gep(later, [offset]), *numbers])

        end = b.add(step, INT(_LINE - 1))
        for_each(b, INT(0), end, _LINE, fetch)
        first = b.gep(rounded, [b.mul(index, INT(of_row))])
        of_x = [b.gep(first, [b.mul(stride, INT(m))]) for m in range(rows)]
        after = INT(self.rounded - 2)
        dots = []
        for m in range(rows):
            if self.offset:
                added = b.load(b.gep(of_x[m], [b.add(after, INT(1))]))
                dots.append(splat(b, added, self.width))
            else:
                dots.append(Repeated(self.integers, 0))
        dots = self._dots(b, at, of_x, dots)
        place = self.block * self.bits // 32 * self.width
        scales = self._load(b, at, place, self.floats)
        minima = None
        if self.minima:
            minima = self._load(b, at, place + self.width, self.floats)
        added = []
        for m in range(rows):
            number = b.bitcast(b.load(b.gep(of_x[m], [after])), FLOAT)
            scale = b.fmul(scales, splat(b, number, self.width))
            total = b.call(fma, [scale, b.sitofp(dots[m], self.floats), sums[m]])
            if minima is not None:
                number = b.load(b.gep(of_x[m], [b.add(after, INT(1))]))
                number = splat(b, b.bitcast(number, FLOAT), self.width)
                total = b.call(fma, [minima, number, total])
            added.append(total)
        following = b.add(index, INT(1))
        index.add_incoming(INT(0), entry)
        index.add_incoming(following, b.block)
        for before, then in zip(sums, added, strict=True):
            before.add_incoming(self._number(0.0), entry)
            before.add_incoming(then, b.block)
        b.cbranch(b.icmp_signed("<", following, blocks), loop, done)
        b.position_at_end(done)
        self._store(b, added, y, outputs, left)
        b.ret_void()
        return function

    def _dots(
        self,
        b: ir.IRBuilder,
        at: ir.Value,
        of_x: Sequence[ir.Value],
        dots: list[ir.Value],
    ) -> list[ir.Value]:
        """Adds the products of a block's integers with those of rows, by row."""
        words = self.block * self.bits // 32
        half = Repeated(self.integers, 0x0F0F0F0F)
        four = Repeated(self.integers, 4)
        pairs = ir.VectorType(_SHORT, 2 * self.width)
        # AVX2 adds products of 8 by 4 bits in 16: of 32 numbers, 32 · 127 · 15 / 2.
        short = self.width == 8 and self.bits == 4
        sums = [Repeated(pairs, 0) for _ in of_x] if short else dots
        for number in range(words):
            word = self._load(b, at, number * self.width, self.integers)
            quads = [(number, word)]
            if self.bits == 4:
                low, high = b.and_(word, half), b.and_(b.lshr(word, four), half)
                quads = [(number, low), (words + number, high)]
            for place, quad in quads:
                sums = [
                    self._add_dot(b, total, quad, row, place)
                    for total, row in zip(sums, of_x, strict=True)
                ]
        if not short:
            return sums
        name, ones = "llvm.x86.avx2.pmadd.wd", Repeated(pairs, 1)
        return [self._call(b, name, self.integers, total, ones) for total in sums]

    def _add_dot(
        self,
        b: ir.IRBuilder,
        total: ir.Value,
        quad: ir.Value,
        row: ir.Value,
        place: int,
    ) -> ir.Value:
        """Adds products of four bytes with number `place` of the words of a row.

        The bytes of `quad` are unsigned, but on ARM signed.
        """

        def spread(number: int) -> ir.Value:
            return splat(b, b.load(b.gep(row, [INT(number)])), self.width)

        bytes_ = ir.VectorType(ir.IntType(8), 4 * self.width)
        if self.splits:
            pairs = ir.VectorType(_SHORT, 2 * self.width)
            of_bytes = b.bitcast(quad, pairs)
            parts = (
                b.and_(of_bytes, Repeated(pairs, 255)),
                b.lshr(of_bytes, Repeated(pairs, 8)),
            )
            for number, part in enumerate(parts):
                four = b.bitcast(spread(2 * place + number), pairs)
                name = "llvm.x86.avx2.pmadd.wd"
                total = b.add(total, self._call(b, name, self.integers, part, four))
            return total
        if self.width == 16:
            name = "llvm.x86.avx512.vpdpbusd.512"
            return self._call(b, name, self.integers, total, quad, spread(place))
        quad, four = b.bitcast(quad, bytes_), b.bitcast(spread(place), bytes_)
        if self.width == ARM:
            name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            return self._call(b, name, self.integers, total, quad, four)
        name = "llvm.x86.avx2.pmadd.ub.sw"
        return b.add(total, self._call(b, name, total.type, quad, four))

    def _call(
        self, b: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value
    ) -> ir.Value:
        kinds = [argument.type for argument in arguments]
        return b.call(intrinsic(b.module, name, result, kinds), arguments)

    def _store(
        self,
        b: ir.IRBuilder,
        vectors: Sequence[ir.Value],
        y: ir.Value,
        outputs: ir.Value,
        left: ir.Value,
    ) -> None:
        bits = ir.VectorType(ir.IntType(1), self.width)
        kinds = [self.floats, self.floats.as_pointer(), _WORD, bits]
        name = f"llvm.masked.store.v{self.width}f32.p0"
        store = intrinsic(b.module, name, ir.VoidType(), kinds)
        lanes = ir.Constant(self.integers, list(range(self.width)))
        exist = b.icmp_signed("<", lanes, splat(b, b.trunc(left, _WORD), self.width))
        for m, vector in enumerate(vectors):
            place = b.gep(y, [b.mul(outputs, INT(m))])
            place = b.bitcast(place, self.floats.as_pointer())
            b.call(store, [vector, place, _WORD(4), exist])

    def _load(
        self, b: ir.IRBuilder, base: ir.Value, place: int, kind: ir.Type
    ) -> ir.Value:
        """A vector from an address of 4-byte numbers."""
        at = b.bitcast(b.gep(base, [INT(place)]), kind.as_pointer())
        loaded = b.load(at)
        loaded.align = 4
        return loaded

    def _number(self, value: float) -> Repeated:
        return Repeated(self.floats, value)
