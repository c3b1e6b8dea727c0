"""The machine code of `row_kernel`, as LLVM's intermediate representation.

XLA calls it through its foreign function interface, whose structs are declared in
`xla/ffi/api/c_api.h` under `jax.ffi.include_dir()`: the offsets below are in bytes, on
machines of 64 bits. XLA promises to support this version of the interface for a year
after the next one.

The matrix is split into chunks of rows. The threads of XLA claim one after another, the
calling thread too: it never waits for a thread that has not begun.
"""

from collections.abc import Callable

from llvmlite import ir

from bpd_jax.models.row_kernel import Tile

_CHUNK = 1 << 15  # Numbers of the matrix in a chunk: 128 KiB.
_SINGLE = 1 << 16  # A matrix of fewer numbers is not shared among threads.

_BYTE, _INT, _FLOAT = ir.IntType(8), ir.IntType(64), ir.FloatType()
_POINTER, _FLOATS = _BYTE.as_pointer(), _FLOAT.as_pointer()
_NULL = ir.Constant(_POINTER, None)

# Functions in XLA_FFI_Api.
_ERROR_DESTROY, _SCHEDULE, _NUM_THREADS = 64, 136, 144

# The state of one product that several threads work on: 8 bytes each.
_FIELDS = ("next", "done", "users", "x", "matrix", "y", "M", "K", "O", "size", "chunks")


def kernel_module(tile: Tile) -> ir.Module:
    """The kernel as LLVM's intermediate representation."""
    module = ir.Module("row_kernel")
    product = _add_product(module, tile)
    work = _add_work(module, product)
    _add_handler(module, tile, product, work)
    return module


def _function(
    module: ir.Module,
    name: str,
    arguments: list[ir.Type],
    result: ir.Type | None = None,
) -> tuple[ir.Function, ir.IRBuilder]:
    """An internal function with an empty first block."""
    kind = ir.FunctionType(result or ir.VoidType(), arguments)
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    return function, ir.IRBuilder(function.append_basic_block("entry"))


def _for_each(
    b: ir.IRBuilder,
    start: ir.Value,
    stop: ir.Value,
    step: int,
    body: Callable[[ir.Value], None],
) -> ir.Value:
    """Runs `body` at start, start + step, … while a whole step is left.

    Returns:
      Where the next step would begin.
    """
    before, function = b.block, b.function
    head = function.append_basic_block("head")
    inside = function.append_basic_block("inside")
    after = function.append_basic_block("after")
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(_INT)
    following = b.add(i, _INT(step))
    b.cbranch(b.icmp_signed("<=", following, stop), inside, after)
    b.position_at_end(inside)
    body(i)
    i.add_incoming(start, before)
    i.add_incoming(following, b.block)
    b.branch(head)
    b.position_at_end(after)
    return i


def _add_tile(module: ir.Module, tile: Tile, lines: int) -> ir.Function:
    """`y[m, o] = sum_k x[m, k] w[o, k]` for a tile's outputs and rows; W divides K.

    Arguments: x, w, y, K, the numbers from one row of y to the next, and an address
    from which every step fetches `lines` vectors into the cache, for a later tile.
    """
    vector = ir.VectorType(_FLOAT, tile.width)
    name = f"tile_{tile.outputs}_{tile.rows}_{lines}"
    kinds = [_FLOATS, _FLOATS, _FLOATS, _INT, _INT, _FLOATS]
    function, b = _function(module, name, kinds)
    x, matrix, y, length, stride, later = function.args
    for pointer in (x, matrix, y):
        pointer.add_attribute("noalias")
    fma = _intrinsic(module, f"llvm.fma.v{tile.width}f32", vector, [vector] * 3)
    kinds = [_POINTER, *[ir.IntType(32)] * 3]
    prefetch = _intrinsic(module, "llvm.prefetch", ir.VoidType(), kinds)

    def row(of: ir.Value, index: int) -> ir.Value:
        return b.gep(of, [b.mul(length, _INT(index))])

    x_rows = [row(x, m) for m in range(tile.rows)]
    w_rows = [row(matrix, o) for o in range(tile.outputs)]
    entry, loop = b.block, function.append_basic_block("loop")
    done = function.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(_INT)
    places = [(m, o) for m in range(tile.rows) for o in range(tile.outputs)]
    sums = {place: b.phi(vector) for place in places}

    def vector_at(of: ir.Value) -> ir.Value:
        loaded = b.load(b.bitcast(b.gep(of, [k]), vector.as_pointer()))
        loaded.align = 4
        return loaded

    w = [vector_at(of) for of in w_rows]
    for line in range(lines):
        # Arguments: to read; into the first cache, or into the second what a later
        # tile of several needs; data.
        level = 3 if lines == tile.outputs else 2
        numbers = [ir.IntType(32)(number) for number in (0, level, 1)]
        offset = b.add(b.mul(k, _INT(lines)), _INT(line * tile.width))
        b.call(prefetch, [b.bitcast(b.gep(later, [offset]), _POINTER), *numbers])
    added = {}
    for m, of in enumerate(x_rows):
        numbers = vector_at(of)
        for o in range(tile.outputs):
            added[m, o] = b.call(fma, [w[o], numbers, sums[m, o]])
    following = b.add(k, _INT(tile.width))
    k.add_incoming(_INT(0), entry)
    k.add_incoming(following, loop)
    for place in places:
        sums[place].add_incoming(ir.Constant(vector, [0.0] * tile.width), entry)
        sums[place].add_incoming(added[place], loop)
    b.cbranch(b.icmp_signed("<", following, length), loop, done)
    b.position_at_end(done)
    for m, o in places:
        place = b.gep(y, [b.add(b.mul(stride, _INT(m)), _INT(o))])
        b.store(_total(b, added[m, o], tile.width), place).align = 4
    b.ret_void()
    return function


def _total(b: ir.IRBuilder, vector: ir.Value, width: int) -> ir.Value:
    """The sum of a vector, by halves: always in the same order."""
    while width > 1:
        width //= 2
        kind = ir.VectorType(ir.IntType(32), width)
        low = ir.Constant(kind, list(range(width)))
        high = ir.Constant(kind, list(range(width, 2 * width)))
        vector = b.fadd(
            b.shuffle_vector(vector, vector, low),
            b.shuffle_vector(vector, vector, high),
        )
    return b.extract_element(vector, ir.IntType(32)(0))


def _intrinsic(
    module: ir.Module, name: str, result: ir.Type, arguments: list[ir.Type]
) -> ir.Function:
    """A function that is defined elsewhere, declared once."""
    if name in module.globals:
        return module.globals[name]
    return ir.Function(module, ir.FunctionType(result, arguments), name)


def _add_product(module: ir.Module, tile: Tile) -> ir.Function:
    """Outputs `first <= o < last` of the product, by tiles.

    While a group of outputs is multiplied, the next group comes from memory: each tile
    fetches an equal part of it.

    Arguments: x, matrix, y, M, K, O, first, last.
    """
    kinds = [_FLOATS] * 3 + [_INT] * 5
    function, b = _function(module, "product", kinds)
    x, matrix, y, rows, length, outputs, first, last = function.args
    tiles = b.sdiv(b.add(rows, _INT(tile.rows - 1)), _INT(tile.rows))
    once, twice = (b.icmp_signed("<=", tiles, _INT(most)) for most in (1, 3))

    def each_group(count: int) -> Callable[[ir.Value], None]:
        def group(o: ir.Value) -> None:
            of_matrix = b.gep(matrix, [b.mul(o, length)])
            behind = b.gep(of_matrix, [b.mul(_INT(count), length)])

            def each_tile(index: ir.Value) -> None:
                m = b.sdiv(b.mul(index, rows), tiles)
                size = b.sub(b.sdiv(b.mul(b.add(index, _INT(1)), rows), tiles), m)
                of_x = b.gep(x, [b.mul(m, length)])
                of_y = b.gep(y, [b.add(b.mul(m, outputs), o)])
                operands = [of_x, of_matrix, of_y, length, outputs]

                def multiply(lines: int) -> None:
                    part = b.mul(index, b.mul(length, _INT(lines)))
                    later = b.gep(behind, [part])
                    end = b.function.append_basic_block("end")
                    choice = b.switch(size, end)
                    for number in range(1, tile.rows + 1):
                        block = b.function.append_basic_block("tile")
                        choice.add_case(_INT(number), block)
                        b.position_at_end(block)
                        called = Tile(tile.width, count, number)
                        b.call(_tile(module, called, lines), [*operands, later])
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

            _for_each(b, _INT(0), tiles, 1, each_tile)

        return group

    o = _for_each(b, first, last, tile.outputs, each_group(tile.outputs))
    _for_each(b, o, last, 1, each_group(1))
    b.ret_void()
    return function


def _tile(module: ir.Module, tile: Tile, lines: int) -> ir.Function:
    """The function of a tile, added once."""
    name = f"tile_{tile.outputs}_{tile.rows}_{lines}"
    return module.globals.get(name) or _add_tile(module, tile, lines)


def _at(b: ir.IRBuilder, base: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
    """Reads from `base + offset` bytes."""
    return b.load(b.bitcast(b.gep(base, [_INT(offset)]), kind.as_pointer()))


def _put(b: ir.IRBuilder, base: ir.Value, offset: int, value: ir.Value) -> None:
    """Writes to `base + offset` bytes."""
    b.store(value, b.bitcast(b.gep(base, [_INT(offset)]), value.type.as_pointer()))


def _counter(b: ir.IRBuilder, state: ir.Value, name: str) -> ir.Value:
    offset = 8 * _FIELDS.index(name)
    return b.bitcast(b.gep(state, [_INT(offset)]), _INT.as_pointer())


def _add_work(module: ir.Module, product: ir.Function) -> ir.Function:
    """What every thread does: claims chunks until none is left, then leaves the state.

    The last thread that leaves frees it. Argument: the state.
    """
    free = _intrinsic(module, "free", ir.VoidType(), [_POINTER])
    function, b = _function(module, "work", [_POINTER])
    (state,) = function.args
    claim, multiply, leave = (
        function.append_basic_block(name) for name in ("claim", "multiply", "leave")
    )
    values = {
        name: _at(b, state, 8 * i, _FLOATS if name in ("x", "matrix", "y") else _INT)
        for i, name in enumerate(_FIELDS)
        if i >= _FIELDS.index("x")
    }
    b.branch(claim)
    b.position_at_end(claim)
    chunk = b.atomic_rmw("add", _counter(b, state, "next"), _INT(1), "monotonic")
    b.cbranch(b.icmp_signed("<", chunk, values["chunks"]), multiply, leave)
    b.position_at_end(multiply)
    first = b.mul(chunk, values["size"])
    last = b.add(first, values["size"])
    last = b.select(b.icmp_signed("<", last, values["O"]), last, values["O"])
    arguments = [values[name] for name in ("x", "matrix", "y", "M", "K", "O")]
    b.call(product, [*arguments, first, last])
    b.atomic_rmw("add", _counter(b, state, "done"), _INT(1), "release")
    b.branch(claim)
    b.position_at_end(leave)
    _leave(b, state, free)
    b.ret_void()
    return function


def _leave(b: ir.IRBuilder, state: ir.Value, free: ir.Function) -> None:
    """Gives one use of the state back; the last one frees it."""
    users = b.atomic_rmw("sub", _counter(b, state, "users"), _INT(1), "acq_rel")
    with b.if_then(b.icmp_signed("==", users, _INT(1))):
        b.call(free, [state])


def _add_handler(
    module: ir.Module, tile: Tile, product: ir.Function, work: ir.Function
) -> None:
    """What XLA calls, with an `XLA_FFI_CallFrame`: M, K and O come from the buffers."""
    kind = ir.FunctionType(_POINTER, [_POINTER])
    function = ir.Function(module, kind, "handler")
    (frame,) = function.args
    b = ir.IRBuilder(function.append_basic_block("entry"))
    extension = _at(b, frame, 8, _POINTER)
    with b.if_then(b.icmp_unsigned("!=", extension, _NULL)):
        # XLA asks which version of the interface this is (0.3), and for its traits.
        metadata = _at(b, extension, 24, _POINTER)
        for offset, number in ((24, 0), (28, 3), (32, 0)):
            _put(b, metadata, offset, ir.IntType(32)(number))
        b.ret(_NULL)
    arguments, results = _at(b, frame, 72, _POINTER), _at(b, frame, 112, _POINTER)
    buffers = [_at(b, arguments, 0, _POINTER), _at(b, arguments, 8, _POINTER)]
    buffers.append(_at(b, results, 0, _POINTER))
    x, matrix, y = (_at(b, buffer, 24, _FLOATS) for buffer in buffers)
    of_x, of_matrix = (_at(b, buffer, 40, _INT.as_pointer()) for buffer in buffers[:2])
    rows, length = b.load(of_x), b.load(b.gep(of_x, [_INT(1)]))
    outputs = b.load(of_matrix)
    whole = [x, matrix, y, rows, length, outputs]
    with b.if_then(b.icmp_signed("<", b.mul(length, outputs), _INT(_SINGLE))):
        b.call(product, [*whole, _INT(0), outputs])
        b.ret(_NULL)
    # Chunks begin at a multiple of a tile's outputs, which is a power of two.
    size = b.add(b.sdiv(_INT(_CHUNK), length), _INT(tile.outputs - 1))
    size = b.and_(size, _INT(-tile.outputs))
    size = b.select(b.icmp_signed("<", size, _INT(1)), _INT(tile.outputs), size)
    chunks = b.sdiv(b.add(outputs, b.sub(size, _INT(1))), size)
    _share(b, module, frame, work, [*whole, size, chunks])
    b.ret(_NULL)


def _share(
    b: ir.IRBuilder,
    module: ir.Module,
    frame: ir.Value,
    work: ir.Function,
    values: list[ir.Value],
) -> None:
    """Multiplies on this thread and on those of XLA that are idle."""
    malloc = _intrinsic(module, "malloc", _POINTER, [_INT])
    interface, context = _at(b, frame, 16, _POINTER), _at(b, frame, 24, _POINTER)
    call = ir.FunctionType(_POINTER, [_POINTER]).as_pointer()

    def ask(offset: int, *arguments: ir.Value) -> ir.Value:
        """Calls a function of XLA; returns its error, or null."""
        struct = b.bitcast(stack, _POINTER)
        size = 8 * (2 + len(arguments))
        for i, value in enumerate((_INT(size), _NULL, *arguments)):
            _put(b, struct, 8 * i, value)
        return b.call(_at(b, interface, offset, call), [struct])

    with b.goto_entry_block():
        stack = b.alloca(ir.ArrayType(_INT, 5))
        threads = b.alloca(_INT)
    b.store(_INT(1), threads)
    ask(_NUM_THREADS, context, b.bitcast(threads, _POINTER))
    chunks = values[-1]
    helpers = b.sub(b.load(threads), _INT(1))
    most = b.sub(chunks, _INT(1))
    helpers = b.select(b.icmp_signed("<", helpers, most), helpers, most)
    state = b.call(malloc, [_INT(8 * len(_FIELDS))])
    # This thread uses it twice: for its work, and to wait for the others.
    users = b.add(helpers, _INT(2))
    for i, value in enumerate([_INT(0), _INT(0), users, *values]):
        _put(b, state, 8 * i, value)
    free = _intrinsic(module, "free", ir.VoidType(), [_POINTER])

    def schedule(_: ir.Value) -> None:
        task = b.bitcast(work, _POINTER)
        error = ask(_SCHEDULE, context, task, state)
        with b.if_then(b.icmp_unsigned("!=", error, _NULL)):
            ask(_ERROR_DESTROY, error)
            _leave(b, state, free)  # No thread will run this task.

    _for_each(b, _INT(0), helpers, 1, schedule)
    b.call(work, [state])
    wait = b.function.append_basic_block("wait")
    end = b.function.append_basic_block("end")
    b.branch(wait)
    b.position_at_end(wait)
    done = b.load_atomic(_counter(b, state, "done"), "acquire", 8)
    b.cbranch(b.icmp_signed("==", done, chunks), end, wait)
    b.position_at_end(end)
    _leave(b, state, free)
