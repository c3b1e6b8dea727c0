"""Functions, loops and vectors in LLVM's intermediate representation."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

INT, FLOAT = ir.IntType(64), ir.FloatType()
POINTER, FLOATS = ir.IntType(8).as_pointer(), FLOAT.as_pointer()
# The bits of bfloat16 numbers, which are the high half of float32.
HALF = ir.IntType(16)
HALVES = HALF.as_pointer()


def add_function(
    module: ir.Module, name: str, arguments: Sequence[ir.Type]
) -> tuple[ir.Function, ir.IRBuilder]:
    """An internal function with an empty first block."""
    kind = ir.FunctionType(ir.VoidType(), arguments)
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    return function, ir.IRBuilder(function.append_basic_block("entry"))


def for_each(
    b: ir.IRBuilder,
    start: ir.Value,
    stop: ir.Value,
    step: int,
    body: Callable[[ir.Value], Any],
) -> ir.Value:
    """Runs `body` at start, start + step, … while a whole step is left.

    Returns where the next step would begin.
    """
    return accumulate(b, start, stop, step, [], lambda i, _: [body(i), []][1])[0]


def accumulate(
    b: ir.IRBuilder,
    start: ir.Value,
    stop: ir.Value,
    step: int,
    initial: Sequence[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
) -> tuple[ir.Value, list[ir.Value]]:
    """`for_each` with values in registers, which `body` gets and returns anew.

    Returns where the next step would begin, and the last values.
    """
    before, function = b.block, b.function
    head = function.append_basic_block("head")
    inside = function.append_basic_block("inside")
    after = function.append_basic_block("after")
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(INT)
    values = [b.phi(value.type) for value in initial]
    following = b.add(i, INT(step))
    b.cbranch(b.icmp_signed("<=", following, stop), inside, after)
    b.position_at_end(inside)
    changed = body(i, list(values))
    i.add_incoming(start, before)
    i.add_incoming(following, b.block)
    for value, first, then in zip(values, initial, changed, strict=True):
        value.add_incoming(first, before)
        value.add_incoming(then, b.block)
    b.branch(head)
    b.position_at_end(after)
    return i, list(values)


def smaller(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed("<", x, y), x, y)


def whole_parts(b: ir.IRBuilder, count: ir.Value, size: ir.Value | int) -> ir.Value:
    """The number of parts of `size`, the last of which may be smaller."""
    if isinstance(size, int):
        return b.sdiv(b.add(count, INT(size - 1)), INT(size))
    return b.sdiv(b.add(count, b.sub(size, INT(1))), size)


def chunk_of(
    b: ir.IRBuilder, chunk: ir.Value, size: ir.Value, count: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The first of `count` numbers in a chunk of `size`, and the one after its last."""
    first = b.mul(chunk, size)
    return first, smaller(b, b.add(first, size), count)


def even_part(
    b: ir.IRBuilder, index: ir.Value, count: ir.Value, parts: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The first number and the size of one of several almost equal parts."""
    first = b.sdiv(b.mul(index, count), parts)
    end = b.sdiv(b.mul(b.add(index, INT(1)), count), parts)
    return first, b.sub(end, first)


def call_for(
    b: ir.IRBuilder,
    count: ir.Value,
    most: int,
    function_of: Callable[[int], ir.Function],
    arguments: Sequence[ir.Value],
) -> None:
    """Calls the function for a count from 1 to `most`."""
    end = b.function.append_basic_block("end")
    choice = b.switch(count, end)
    for number in range(1, most + 1):
        block = b.function.append_basic_block("rows")
        choice.add_case(INT(number), block)
        b.position_at_end(block)
        b.call(function_of(number), arguments)
        b.branch(end)
    b.position_at_end(end)


def load_floats(b: ir.IRBuilder, place: ir.Value, width: int) -> ir.Value:
    """A vector of float32 from an address of `FLOATS` or `HALVES`."""
    kind = place.type.pointee
    loaded = b.load(b.bitcast(place, ir.VectorType(kind, width).as_pointer()))
    loaded.align = 2 if kind is HALF else 4
    return widened(b, loaded)


class Repeated(ir.Constant):
    """A vector that repeats a constant; LLVM reads it sooner than all its numbers."""

    def __init__(self, kind: ir.VectorType, value: Any) -> None:
        super().__init__(kind, ir.Constant(kind.element, value))

    def _get_reference(self) -> str:
        return f"splat ({self.constant[0]})"


def splat(b: ir.IRBuilder, number: ir.Value, width: int) -> ir.Value:
    one = ir.Constant(ir.VectorType(number.type, width), ir.Undefined)
    one = b.insert_element(one, number, ir.IntType(32)(0))
    lanes = Repeated(ir.VectorType(ir.IntType(32), width), 0)
    return b.shuffle_vector(one, one, lanes)


def fused(module: ir.Module, width: int) -> ir.Function:
    """Multiply and add of vectors of float32, rounded once."""
    vector = ir.VectorType(FLOAT, width)
    return intrinsic(module, f"llvm.fma.v{width}f32", vector, [vector] * 3)


def widened(b: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """A vector of float32, or of the bits of bfloat16, as float32."""
    if vector.type.element is FLOAT:
        return vector
    words = ir.VectorType(ir.IntType(32), vector.type.count)
    high = b.shl(b.zext(vector, words), Repeated(words, 16))
    return b.bitcast(high, ir.VectorType(FLOAT, words.count))


def reduce_vector(
    b: ir.IRBuilder,
    vector: ir.Value,
    combine: Callable[[ir.Value, ir.Value], ir.Value],
) -> ir.Value:
    """A vector's numbers combined by halves: always in the same order."""
    width = vector.type.count
    while width > 1:
        width //= 2
        kind = ir.VectorType(ir.IntType(32), width)
        low = ir.Constant(kind, list(range(width)))
        high = ir.Constant(kind, list(range(width, 2 * width)))
        vector = combine(
            b.shuffle_vector(vector, vector, low),
            b.shuffle_vector(vector, vector, high),
        )
    return b.extract_element(vector, ir.IntType(32)(0))


def intrinsic(
    module: ir.Module, name: str, result: ir.Type, arguments: Sequence[ir.Type]
) -> ir.Function:
    """A function that is defined elsewhere, declared once."""
    if name in module.globals:
        return module.globals[name]
    return ir.Function(module, ir.FunctionType(result, arguments), name)
