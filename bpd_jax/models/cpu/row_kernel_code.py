"""The machine code of `row_kernel`, as LLVM's intermediate representation.

The matrix is split into chunks of rows, which the threads of XLA multiply.
"""

from collections.abc import Callable, Sequence

from llvmlite import ir

from bpd_jax.models.cpu.llvm_code import (
    FLOAT,
    FLOATS,
    HALVES,
    INT,
    POINTER,
    add_function,
    for_each,
    intrinsic,
    load_floats,
    sums_of,
)
from bpd_jax.models.cpu.tile import Tile
from bpd_jax.models.cpu.xla_kernel import Buffers, Split, kernel_module

_CHUNK = 1 << 15  # Numbers of the matrix in a chunk: 128 KiB, or 64 in bfloat16.
_SINGLE = 1 << 16  # A matrix of fewer numbers is processed by one thread.


def product_module(tile: Tile, half: bool) -> ir.Module:
    """The kernel as LLVM's intermediate representation.

    Args:
      tile: outputs and rows that registers hold.
      half: whether the matrix is bfloat16; x and the result are float32.
    """
    matrix_kind = HALVES if half else FLOATS

    def split(b: ir.IRBuilder, buffers: Buffers) -> Split:
        rows, length = buffers.size(0, 0), buffers.size(0, 1)
        outputs = buffers.size(1, 0)
        # Chunks begin at a multiple of a tile's outputs, which is a power of two.
        size = b.add(b.sdiv(INT(_CHUNK), length), INT(tile.outputs - 1))
        size = b.and_(size, INT(-tile.outputs))
        size = b.select(b.icmp_signed("<", size, INT(1)), INT(tile.outputs), size)
        return Split(
            values=[*map(buffers.data, range(3), kinds), rows, length, outputs, size],
            chunks=b.sdiv(b.add(outputs, b.sub(size, INT(1))), size),
            alone=b.icmp_signed("<", b.mul(length, outputs), INT(_SINGLE)),
        )

    def run(b: ir.IRBuilder, values: Sequence[ir.Value], chunk: ir.Value) -> None:
        *operands, outputs, size = values
        first = b.mul(chunk, size)
        last = b.add(first, size)
        last = b.select(b.icmp_signed("<", last, outputs), last, outputs)
        product = _add_product(b.module, tile, matrix_kind)
        b.call(product, [*operands, outputs, first, last])

    kinds = [FLOATS, matrix_kind, FLOATS] + [INT] * 4
    return kernel_module("row_kernel", 2, 1, split, kinds, run)


def _add_tile(
    module: ir.Module, tile: Tile, lines: int, stored: ir.Type
) -> ir.Function:
    """`y[m, o] = sum_k x[m, k] w[o, k]` for a tile's outputs and rows; W divides K.

    Arguments: x, w, y, K, the numbers from one row of y to the next, and an address
    from which every step fetches `lines` vectors into the cache, for a later tile.
    `stored` is the type of w and of this address.
    """
    vector = ir.VectorType(FLOAT, tile.width)
    name = f"tile_{tile.outputs}_{tile.rows}_{lines}"
    kinds = [FLOATS, stored, FLOATS, INT, INT, stored]
    function, b = add_function(module, name, kinds)
    x, matrix, y, length, stride, later = function.args
    for pointer in (x, matrix, y):
        pointer.add_attribute("noalias")
    fma = intrinsic(module, f"llvm.fma.v{tile.width}f32", vector, [vector] * 3)
    kinds = [POINTER, *[ir.IntType(32)] * 3]
    prefetch = intrinsic(module, "llvm.prefetch", ir.VoidType(), kinds)

    def row(of: ir.Value, index: int) -> ir.Value:
        return b.gep(of, [b.mul(length, INT(index))])

    x_rows = [row(x, m) for m in range(tile.rows)]
    w_rows = [row(matrix, o) for o in range(tile.outputs)]
    entry, loop = b.block, function.append_basic_block("loop")
    done = function.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(INT)
    places = [(m, o) for m in range(tile.rows) for o in range(tile.outputs)]
    sums = {place: b.phi(vector) for place in places}

    def vector_at(of: ir.Value) -> ir.Value:
        return load_floats(b, b.gep(of, [k]), tile.width)

    w = [vector_at(of) for of in w_rows]
    for line in range(lines):
        # Arguments: a read; into the first-level cache, or into the second-level one
        # if several later tiles use it; of data.
        level = 3 if lines == tile.outputs else 2
        numbers = [ir.IntType(32)(number) for number in (0, level, 1)]
        offset = b.add(b.mul(k, INT(lines)), INT(line * tile.width))
        b.call(prefetch, [b.bitcast(b.gep(later, [offset]), POINTER), *numbers])
    added = {}
    for m, of in enumerate(x_rows):
        numbers = vector_at(of)
        for o in range(tile.outputs):
            added[m, o] = b.call(fma, [w[o], numbers, sums[m, o]])
    following = b.add(k, INT(tile.width))
    k.add_incoming(INT(0), entry)
    k.add_incoming(following, loop)
    for place in places:
        sums[place].add_incoming(ir.Constant(vector, [0.0] * tile.width), entry)
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


def _add_product(module: ir.Module, tile: Tile, stored: ir.Type) -> ir.Function:
    """Outputs `first <= o < last` of the product, by tiles.

    While a group of outputs is multiplied, the next group comes from memory: each tile
    fetches an equal part of it.

    Arguments: x, matrix, y, M, K, O, first, last; `stored` is the type of the matrix.
    """
    kinds = [FLOATS, stored, FLOATS] + [INT] * 5
    function, b = add_function(module, "product", kinds)
    x, matrix, y, rows, length, outputs, first, last = function.args
    tiles = b.sdiv(b.add(rows, INT(tile.rows - 1)), INT(tile.rows))
    once, twice = (b.icmp_signed("<=", tiles, INT(most)) for most in (1, 3))

    def each_group(count: int) -> Callable[[ir.Value], None]:
        def group(o: ir.Value) -> None:
            of_matrix = b.gep(matrix, [b.mul(o, length)])
            behind = b.gep(of_matrix, [b.mul(INT(count), length)])

            def each_tile(index: ir.Value) -> None:
                m = b.sdiv(b.mul(index, rows), tiles)
                size = b.sub(b.sdiv(b.mul(b.add(index, INT(1)), rows), tiles), m)
                of_x = b.gep(x, [b.mul(m, length)])
                of_y = b.gep(y, [b.add(b.mul(m, outputs), o)])
                operands = [of_x, of_matrix, of_y, length, outputs]

                def multiply(lines: int) -> None:
                    part = b.mul(index, b.mul(length, INT(lines)))
                    later = b.gep(behind, [part])
                    end = b.function.append_basic_block("end")
                    choice = b.switch(size, end)
                    for number in range(1, tile.rows + 1):
                        block = b.function.append_basic_block("tile")
                        choice.add_case(INT(number), block)
                        b.position_at_end(block)
                        called = Tile(tile.width, count, number)
                        function = _tile(module, called, lines, stored)
                        b.call(function, [*operands, later])
                        b.branch(end)
                    b.position_at_end(end)

                with b.if_else(once) as (then, otherwise):
                    with then:
                        multiply(count)
                    with otherwise, b.if_else(twice) as (then_two, otherwise_one):
                        with then_two:
                            multiply(max(1, count // 2))
                        with otherwise_one:
                            multiply(max(1, count // 4))

            for_each(b, INT(0), tiles, 1, each_tile)

        return group

    o = for_each(b, first, last, tile.outputs, each_group(tile.outputs))
    for_each(b, o, last, 1, each_group(1))
    b.ret_void()
    return function


def _tile(module: ir.Module, tile: Tile, lines: int, stored: ir.Type) -> ir.Function:
    """The function of a tile, added once."""
    name = f"tile_{tile.outputs}_{tile.rows}_{lines}"
    return module.globals.get(name) or _add_tile(module, tile, lines, stored)
