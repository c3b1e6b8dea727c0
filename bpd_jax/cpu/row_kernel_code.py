"""The machine code of `row_kernel`, as LLVM's intermediate representation.

The matrix is split into chunks of rows, which the threads of XLA multiply.
"""

from collections.abc import Callable, Sequence

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
    load_floats,
    sums_of,
    whole_parts,
)
from bpd_jax.cpu.stored_code import expansion, kinds_of, load, row
from bpd_jax.cpu.tile import Storage, Tile
from bpd_jax.cpu.xla_kernel import Buffers, Split, kernel_module

_CHUNK = 1 << 15  # Numbers of the matrix in a chunk: 128 KiB in float32.
_SINGLE = 1 << 16  # A matrix of fewer numbers is processed by one thread.
_LINE = 64  # Bytes of a cache line.
_FLOAT32 = Storage()


def product_module(tile: Tile, stored: Storage) -> ir.Module:
    """The kernel in LLVM's representation; x and the result are float32."""
    inputs = 1 + stored.arrays

    def split(b: ir.IRBuilder, buffers: Buffers) -> Split:
        rows, length = buffers.size(0, 0), buffers.size(0, 1)
        outputs = buffers.size(1, 0)
        # Chunks begin at a multiple of a tile's outputs, which is a power of two.
        size = b.add(b.sdiv(INT(_CHUNK), length), INT(tile.outputs - 1))
        size = b.and_(size, INT(-tile.outputs))
        size = b.select(b.icmp_signed("<", size, INT(1)), INT(tile.outputs), size)
        data = map(buffers.data, range(inputs + 1), kinds)
        return Split(
            values=[*data, rows, length, outputs, size],
            chunks=whole_parts(b, outputs, size),
            alone=b.icmp_signed("<", b.mul(length, outputs), INT(_SINGLE)),
        )

    def run(b: ir.IRBuilder, values: Sequence[ir.Value], chunk: ir.Value) -> None:
        *operands, outputs, size = values
        first, last = chunk_of(b, chunk, size, outputs)
        product = _add_product(b.module, tile, stored)
        b.call(product, [*operands, outputs, first, last])

    kinds = [FLOATS, *kinds_of(stored), FLOATS] + [INT] * 4
    matrix = range(1, inputs)
    return kernel_module("row_kernel", inputs, 1, split, kinds, run, matrix)


def expansion_module(tile: Tile, stored: Storage) -> ir.Module:
    """A kernel that writes the values of a quantized matrix; see `product_module`."""

    def split(b: ir.IRBuilder, buffers: Buffers) -> Split:
        inputs = stored.arrays
        outputs, length = buffers.size(inputs, 0), buffers.size(inputs, 1)
        size = b.add(b.sdiv(INT(_CHUNK), length), INT(1))
        data = map(buffers.data, range(inputs + 1), kinds)
        return Split(
            values=[*data, length, outputs, size],
            chunks=whole_parts(b, outputs, size),
            alone=b.icmp_signed("<", b.mul(length, outputs), INT(_SINGLE)),
        )

    def run(b: ir.IRBuilder, values: Sequence[ir.Value], chunk: ir.Value) -> None:
        *arrays, y, length, outputs, size = values
        first, last = chunk_of(b, chunk, size, outputs)
        expand = expansion(b.module, stored, tile.width)

        def each_row(o: ir.Value) -> None:
            of = row(b, stored, arrays, o, length)
            b.call(expand, [*of, b.gep(y, [b.mul(o, length)]), length])

        for_each(b, first, last, 1, each_row)

    kinds = [*kinds_of(stored), FLOATS] + [INT] * 3
    matrix = range(stored.arrays)
    return kernel_module("expansion", len(matrix), 1, split, kinds, run, matrix)


def _add_tile(
    module: ir.Module, tile: Tile, lines: int, stored: Storage, fetched: Storage
) -> ir.Function:
    """`y[m, o] = sum_k x[m, k] w[o, k]` for a tile's outputs and rows.

    Arguments: x, the arrays of w, y, K, which is a multiple of a step, the numbers from
    one row of y to the next, and an address from which every number of K fetches
    `lines` numbers, stored as `fetched`, into the cache, for a later tile.
    """
    vector = ir.VectorType(FLOAT, tile.width)
    kinds = [FLOATS, *kinds_of(stored), FLOATS, INT, INT, POINTER]
    name = _tile_name(tile, lines, stored)
    function, b = add_function(module, name, kinds)
    x, *matrix, y, length, stride, later = function.args
    for pointer in (x, *matrix, y):
        pointer.add_attribute("noalias")
    fma = fused(module, tile.width)
    kinds = [POINTER, *[ir.IntType(32)] * 3]
    prefetch = intrinsic(module, "llvm.prefetch", ir.VoidType(), kinds)
    x_rows = [b.gep(x, [b.mul(length, INT(m))]) for m in range(tile.rows)]
    w_rows = [row(b, stored, matrix, INT(o), length) for o in range(tile.outputs)]
    entry, loop = b.block, function.append_basic_block("loop")
    done = function.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(INT)
    places = [(m, o) for m in range(tile.rows) for o in range(tile.outputs)]
    sums = {place: b.phi(vector) for place in places}
    step = stored.step(tile.width)
    size = fetched.nbytes(lines * step)
    begin = b.sdiv(b.mul(k, INT(size)), INT(step))
    for offset in range(0, size, _LINE):
        # Arguments: a read; into the first-level cache, or into the second-level one
        # if several later tiles use it; of data.
        level = 3 if lines == tile.outputs else 2
        numbers = [ir.IntType(32)(number) for number in (0, level, 1)]
        b.call(prefetch, [b.gep(later, [b.add(begin, INT(offset))]), *numbers])
    added = dict(sums)
    w_vectors = [load(b, stored, of, k, tile.width) for of in w_rows]
    for number, w in enumerate(zip(*w_vectors, strict=True)):
        column = b.add(k, INT(number * tile.width))
        for m, of in enumerate(x_rows):
            numbers = load_floats(b, b.gep(of, [column]), tile.width)
            for o in range(tile.outputs):
                added[m, o] = b.call(fma, [w[o], numbers, added[m, o]])
    following = b.add(k, INT(step))
    k.add_incoming(INT(0), entry)
    k.add_incoming(following, loop)
    for place in places:
        sums[place].add_incoming(Repeated(vector, 0.0), entry)
        sums[place].add_incoming(added[place], loop)
    b.cbranch(b.icmp_signed("<", following, length), loop, done)
    b.position_at_end(done)
    results = sums_of(b, [added[place] for place in places])
    for m in range(tile.rows):
        number, first = divmod(m * tile.outputs, results[0].type.count)
        lanes = [first + o for o in range(tile.outputs)]
        mask = ir.Constant(ir.VectorType(ir.IntType(32), tile.outputs), lanes)
        part = b.shuffle_vector(results[number], results[number], mask)
        place = b.bitcast(b.gep(y, [b.mul(stride, INT(m))]), part.type.as_pointer())
        b.store(part, place).align = 4
    b.ret_void()
    return function


def _add_product(module: ir.Module, tile: Tile, stored: Storage) -> ir.Function:
    """Outputs `first <= o < last` of the product, by tiles.

    While a group of outputs is multiplied, the next group comes from memory: each tile
    fetches an equal part of it. If several tiles multiply the same group of a quantized
    matrix, it is expanded before.

    Arguments: x, the arrays of the matrix, y, M, K, O, first, last.
    """
    kinds = [FLOATS, *kinds_of(stored), FLOATS] + [INT] * 5
    function, b = add_function(module, "product", kinds)
    x, *matrix, y, rows, length, outputs, first, last = function.args
    tiles = whole_parts(b, rows, tile.rows)
    once, twice = (b.icmp_signed("<=", tiles, INT(most)) for most in (1, 3))
    expanded = _FLOAT32 if stored.block else stored
    allocated = scratch = ir.Constant(POINTER, None)
    if stored.block:
        malloc = intrinsic(module, "malloc", POINTER, [INT])
        size = b.add(b.mul(length, INT(4 * tile.outputs)), INT(_LINE))
        allocated = b.call(malloc, [b.select(once, INT(_LINE), size)])
        aligned = b.add(b.ptrtoint(allocated, INT), INT(_LINE - 1))
        scratch = b.inttoptr(b.and_(aligned, INT(-_LINE)), FLOATS)

    def each_group(count: int) -> Callable[[ir.Value], None]:
        def group(o: ir.Value) -> None:
            arrays = row(b, stored, matrix, o, length)
            behind = row(b, stored, arrays, INT(count), length)[0]
            behind = b.bitcast(behind, POINTER)

            def multiply(
                index: ir.Value, lines: int, kind: Storage, arrays: Sequence[ir.Value]
            ) -> None:
                m, size = even_part(b, index, rows, tiles)
                of_x = b.gep(x, [b.mul(m, length)])
                of_y = b.gep(y, [b.add(b.mul(m, outputs), o)])
                part = b.mul(index, b.mul(length, INT(lines * stored.bits)))
                later = b.gep(behind, [b.sdiv(part, INT(8))])
                operands = [of_x, *arrays, of_y, length, outputs, later]

                def function_of(number: int) -> ir.Function:
                    called = Tile(tile.width, count, number)
                    return _tile(module, called, lines, kind, stored)

                call_for(b, size, tile.rows, function_of, operands)

            def each_tile(index: ir.Value) -> None:
                with b.if_else(twice) as (then_two, otherwise_one):
                    with then_two:
                        multiply(index, max(1, count // 2), expanded, source)
                    with otherwise_one:
                        multiply(index, max(1, count // 4), expanded, source)

            with b.if_else(once) as (then, otherwise):
                with then:
                    multiply(INT(0), count, stored, arrays)
                with otherwise:
                    source = arrays
                    if stored.block:
                        source = [scratch]
                        expand = expansion(module, stored, tile.width)
                        for number in range(count):
                            place = INT(number)
                            of = row(b, stored, arrays, place, length)
                            to = b.gep(scratch, [b.mul(place, length)])
                            b.call(expand, [*of, to, length])
                    for_each(b, INT(0), tiles, 1, each_tile)

        return group

    o = for_each(b, first, last, tile.outputs, each_group(tile.outputs))
    for_each(b, o, last, 1, each_group(1))
    if stored.block:
        b.call(intrinsic(module, "free", ir.VoidType(), [POINTER]), [allocated])
    b.ret_void()
    return function


def _tile_name(tile: Tile, lines: int, stored: Storage) -> str:
    return f"tile_{tile.outputs}_{tile.rows}_{lines}_{stored.bits}"


def _tile(
    module: ir.Module, tile: Tile, lines: int, stored: Storage, fetched: Storage
) -> ir.Function:
    """The function of a tile, added once."""
    known = module.globals.get(_tile_name(tile, lines, stored))
    return known or _add_tile(module, tile, lines, stored, fetched)
