"""The machine code of `float_kernel`, as LLVM's intermediate representation.

The matrix is split into chunks of outputs, which the threads of XLA multiply. A tile is
of the outputs of `GROUPS` vectors and of some rows of x: every number of the matrix is
multiplied with those rows, one number of each at a time, and every pair of a vector of
outputs and a row has a register, to which products are added in the order of K.
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
    accumulate,
    add_function,
    call_for,
    chunk_of,
    even_part,
    for_each,
    fused,
    intrinsic,
    splat,
    whole_parts,
)
from bpd_jax.cpu.stored_code import WORDS, StoredBlock
from bpd_jax.cpu.tile import GROUPS, Storage
from bpd_jax.cpu.xla_kernel import Buffers, Split, kernel_module

_CHUNK = 1 << 15  # Numbers of the matrix in a chunk.
_SINGLE = 1 << 16  # A matrix of fewer numbers is processed by one thread.
_LINE = 64  # Bytes of a cache line.
_FLOAT32 = Storage()

# Rows that are multiplied at once with a matrix as it is stored.
_MOST_ROWS = 9
# Of more rows so many are, with numbers that were expanded before: a part of K of so
# many bytes, in the first-level cache.
_TILE_ROWS = 6
_EXPANDED = 1 << 15


def vectors_of(width: int, rows: int) -> int:
    """Vectors of outputs that are multiplied at once with some rows.

    With the numbers of the matrix and one of x they must fit into registers, of which
    AVX2 has 16, others 32; one row needs several to hide the time of an addition.
    """
    if width == 8:
        return 4 if rows == 1 else 2 if rows <= 6 else 1
    return 4 if rows <= 2 else 2


def float_module(width: int, stored: Storage) -> ir.Module:
    """The kernel as LLVM's intermediate representation.

    Its arguments are x `[M, K]` and `TiledMatrix.words` of a storage, its result `[M, G
    · W]`.
    """

    def split(b: ir.IRBuilder, buffers: Buffers) -> Split:
        rows, length = buffers.size(0, 0), buffers.size(0, 1)
        tiles = b.sdiv(buffers.size(1, 0), INT(GROUPS))
        of_tile = b.mul(length, INT(GROUPS * width))
        size = b.add(b.sdiv(INT(_CHUNK), of_tile), INT(1))
        data = map(buffers.data, range(3), kinds)
        return Split(
            values=[*data, rows, length, buffers.size(1, 1), tiles, size],
            chunks=whole_parts(b, tiles, size),
            alone=b.icmp_signed("<", b.mul(tiles, of_tile), INT(_SINGLE)),
        )

    def run(b: ir.IRBuilder, values: Sequence[ir.Value], chunk: ir.Value) -> None:
        x, matrix, y, rows, length, blocks, tiles, size = values
        code = _Code(b.module, width, stored)
        outputs = b.mul(tiles, INT(GROUPS * width))
        group = b.mul(blocks, INT(stored.words * width))
        first, last = chunk_of(b, chunk, size, tiles)

        def each(tile: ir.Value) -> None:
            of_matrix = b.gep(matrix, [b.mul(tile, b.mul(group, INT(GROUPS)))])
            of_y = b.gep(y, [b.mul(tile, INT(GROUPS * width))])
            operands = [x, length, of_matrix, group, of_y, outputs, blocks]
            few = b.icmp_signed("<=", rows, INT(_MOST_ROWS))
            with b.if_else(few) as (then, otherwise):
                with then:
                    call_for(b, rows, _MOST_ROWS, code.tile, [*operands, INT(1)])
                with otherwise:
                    b.call(code.many_rows(), [*operands, rows])

        for_each(b, first, last, 1, each)

    kinds = [FLOATS, WORDS, FLOATS, *[INT] * 5]
    return kernel_module("float_kernel", 2, 1, split, kinds, run, [1])


class _Code:
    """The functions of a kind of matrix, each added once.

    Arguments of all: x, its numbers in a row; the first of `GROUPS` vectors of outputs,
    words from one to the next; y, its numbers in a row; blocks of K.
    """

    def __init__(self, module: ir.Module, width: int, stored: Storage) -> None:
        self.module, self.width, self.stored = module, width, stored
        self.vector = ir.VectorType(FLOAT, width)
        self.kinds = [FLOATS, INT, WORDS, INT, FLOATS, INT, INT]

    def tile(self, rows: int) -> ir.Function:
        """Multiplies some rows with the outputs.

        A further argument is 0 if products are added to those in y.
        """
        name = f"tile_{self.stored.bits}_{rows}"
        if name in self.module.globals:
            return self.module.globals[name]
        function, b = add_function(self.module, name, [*self.kinds, INT])
        x, length, matrix, group, y, outputs, blocks, begins = function.args
        for pointer in (x, matrix, y):
            pointer.add_attribute("noalias")
        vectors = vectors_of(self.width, rows)
        of_rows = [b.gep(x, [b.mul(length, INT(m))]) for m in range(rows)]
        adds = b.icmp_signed("==", begins, INT(0))

        def some(first: ir.Value) -> None:
            numbers = [b.add(first, INT(v)) for v in range(vectors)]
            groups = [b.gep(matrix, [b.mul(group, number)]) for number in numbers]
            places = []
            for m in range(rows):
                of_row = b.gep(y, [b.mul(outputs, INT(m))])
                for number in numbers:
                    place = b.gep(of_row, [b.mul(number, INT(self.width))])
                    places.append(b.bitcast(place, self.vector.as_pointer()))
            later = b.mul(group, INT(vectors))
            sums = self._begin(b, adds, places)
            sums = self._products(b, of_rows, groups, later, blocks, sums)
            for place, total in zip(places, sums, strict=True):
                b.store(total, place).align = 4

        for_each(b, INT(0), INT(GROUPS), vectors, some)
        b.ret_void()
        return function

    def _begin(
        self, b: ir.IRBuilder, adds: ir.Value, places: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """Zeros, or the sums at some places, which are read only if it `adds`."""
        before = b.block
        with b.if_then(adds):
            loaded = [b.load(place) for place in places]
            for vector in loaded:
                vector.align = 4
            inside = b.block
        sums = [b.phi(self.vector) for _ in places]
        for total, vector in zip(sums, loaded, strict=True):
            total.add_incoming(Repeated(self.vector, 0.0), before)
            total.add_incoming(vector, inside)
        return sums

    def _products(
        self,
        b: ir.IRBuilder,
        of_rows: Sequence[ir.Value],
        groups: Sequence[ir.Value],
        later: ir.Value,
        blocks: ir.Value,
        sums: list[ir.Value],
    ) -> list[ir.Value]:
        """Adds products to sums, by row and group.

        The words that are `later` than those of a group are fetched into the cache.
        """
        stored, width = self.stored, self.width
        size = stored.words * width

        def block(place: ir.Value, k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            places = [b.gep(of, [place]) for of in groups]
            codes = [StoredBlock(b, stored, width, at) for at in places]
            for part in range(stored.parts):
                begin = b.add(k, INT(part * stored.block // stored.parts))

                def word(
                    index: ir.Value,
                    sums: list[ir.Value],
                    part: int = part,
                    begin: ir.Value = begin,
                ) -> list[ir.Value]:
                    column = b.add(begin, b.mul(index, INT(stored.numbers)))
                    at = [b.gep(of, [b.mul(index, INT(width))]) for of in places]
                    for j in range(stored.numbers):
                        numbers = [
                            code.number(b, each, part, j)
                            for code, each in zip(codes, at, strict=True)
                        ]
                        of_x = [b.gep(row, [b.add(column, INT(j))]) for row in of_rows]
                        sums = self._add(b, of_x, numbers, sums)
                    return sums

                if stored.integers == 1:
                    sums = word(INT(0), sums)
                else:
                    _, sums = accumulate(b, INT(0), INT(stored.integers), 1, sums, word)
            return sums

        def several(
            count: int, index: ir.Value, sums: list[ir.Value]
        ) -> list[ir.Value]:
            begin = b.mul(index, INT(size))
            for of in groups:
                self._fetch(b, b.gep(of, [b.add(begin, later)]), 4 * size * count)
            for number in range(count):
                place = b.add(begin, INT(number * size))
                k = b.mul(b.add(index, INT(number)), INT(stored.block))
                sums = block(place, k, sums)
            return sums

        # A word of floating-point numbers is little for an iteration. With too many,
        # LLVM loads numbers long before they are needed, which takes registers.
        at, most = INT(0), 1 if stored.scaled else 4 if len(sums) <= 4 else 2
        for count in sorted({most, 1}, reverse=True):
            step = functools.partial(several, count)
            at, sums = accumulate(b, at, blocks, count, sums, step)
        return sums

    def _add(
        self,
        b: ir.IRBuilder,
        of_x: Sequence[ir.Value],
        numbers: Sequence[ir.Value],
        sums: Sequence[ir.Value],
    ) -> list[ir.Value]:
        """Adds the products of a number of each row with numbers of the outputs."""
        fma = fused(self.module, self.width)
        added: list[ir.Value] = []
        for place in of_x:
            x = splat(b, b.load(place), self.width)
            of_row = sums[len(added) :]
            added += [
                b.call(fma, [number, x, total])
                for number, total in zip(numbers, of_row, strict=False)
            ]
        return added

    def _fetch(self, b: ir.IRBuilder, place: ir.Value, size: int) -> None:
        kinds = [POINTER, *[ir.IntType(32)] * 3]
        prefetch = intrinsic(self.module, "llvm.prefetch", ir.VoidType(), kinds)
        place = b.bitcast(place, POINTER)
        for offset in range(0, size, _LINE):
            # Arguments: a read; into the first-level cache; of data.
            numbers = [ir.IntType(32)(number) for number in (0, 3, 1)]
            b.call(prefetch, [b.gep(place, [INT(offset)]), *numbers])

    def many_rows(self) -> ir.Function:
        """Multiplies any number of rows, a further argument, with the outputs."""
        function, b = add_function(self.module, "many_rows", [*self.kinds, INT])
        x, length, matrix, group, y, outputs, blocks, rows = function.args
        block, width = self.stored.block, self.width
        most = _EXPANDED // (4 * GROUPS * width)
        scratch = b.alloca(ir.ArrayType(self.vector, most * GROUPS))
        scratch = b.bitcast(scratch, WORDS)
        floats = _Code(self.module, width, _FLOAT32)
        tiles = whole_parts(b, rows, _TILE_ROWS)

        def part(index: ir.Value) -> None:
            first, end = chunk_of(b, index, INT(most // block), blocks)
            count, k = b.sub(end, first), b.mul(first, INT(block))
            of = b.gep(matrix, [b.mul(first, INT(self.stored.words * width))])
            stride = group
            if self.stored.bits != 32:
                self._expand(b, of, group, scratch, most, count)
                of, stride = scratch, INT(most * width)
            begins = b.zext(b.icmp_signed("==", first, INT(0)), INT)
            numbers = b.mul(count, INT(block))

            def tile(index: ir.Value) -> None:
                m, size = even_part(b, index, rows, tiles)
                of_x = b.gep(x, [b.add(b.mul(m, length), k)])
                of_y = b.gep(y, [b.mul(m, outputs)])
                operands = [of_x, length, of, stride, of_y, outputs, numbers, begins]
                call_for(b, size, _TILE_ROWS, floats.tile, operands)

            for_each(b, INT(0), tiles, 1, tile)

        for_each(b, INT(0), whole_parts(b, blocks, most // block), 1, part)
        b.ret_void()
        return function

    def _expand(
        self,
        b: ir.IRBuilder,
        source: ir.Value,
        group: ir.Value,
        scratch: ir.Value,
        most: int,
        count: ir.Value,
    ) -> None:
        """Writes the numbers of `count` blocks to `scratch`, `most` of each group."""
        stored, width = self.stored, self.width

        def each(v: ir.Value) -> None:
            of = b.gep(source, [b.mul(v, group)])
            to = b.gep(scratch, [b.mul(v, INT(most * width))])

            def block(index: ir.Value) -> None:
                at = b.gep(of, [b.mul(index, INT(stored.words * width))])
                code = StoredBlock(b, stored, width, at)
                place = b.gep(to, [b.mul(index, INT(stored.block * width))])
                place = b.bitcast(place, self.vector.as_pointer())
                for k in range(stored.block):
                    part, number = divmod(k, stored.block // stored.parts)
                    word, j = divmod(number, stored.numbers)
                    value = code.number(b, b.gep(at, [INT(word * width)]), part, j)
                    b.store(value, b.gep(place, [INT(k)])).align = 4

            for_each(b, INT(0), count, 1, block)

        for_each(b, INT(0), INT(GROUPS), 1, each)
