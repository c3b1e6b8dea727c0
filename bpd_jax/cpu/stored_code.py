"""How stored numbers become vectors of float32, in LLVM's intermediate representation.

The numbers of a quantized matrix become `scale · integer + minimum` in registers, as
`QuantizedMatrix.values` expands them: the product is exact, so one rounding is left.
"""

from collections.abc import Sequence

from llvmlite import ir

from bpd_jax.cpu.llvm_code import (
    FLOATS,
    HALVES,
    INT,
    POINTER,
    Repeated,
    add_function,
    for_each,
    fused,
    load_floats,
    splat,
)
from bpd_jax.cpu.tile import Storage
from bpd_jax.models.quantized import PACKED_BLOCK

_HALF_BLOCK = PACKED_BLOCK // 2


def kinds_of(stored: Storage) -> list[ir.Type]:
    """The types of the addresses of a matrix's arrays."""
    if not stored.block:
        return [FLOATS if stored.bits == 32 else HALVES]
    return [POINTER] + [FLOATS] * (stored.arrays - 1)


def row(
    b: ir.IRBuilder,
    stored: Storage,
    arrays: Sequence[ir.Value],
    index: ir.Value,
    length: ir.Value,
) -> list[ir.Value]:
    """The addresses of row `index` of a matrix with rows of `length` numbers."""
    first = b.mul(index, length)
    numbers, *blocks = arrays
    if stored.block:
        place = b.lshr(first, INT(1)) if stored.bits == 4 else first
        in_blocks = b.sdiv(first, INT(stored.block))
        return [b.gep(numbers, [place]), *(b.gep(of, [in_blocks]) for of in blocks)]
    return [b.gep(numbers, [first])]


def load(
    b: ir.IRBuilder,
    stored: Storage,
    arrays: Sequence[ir.Value],
    k: ir.Value,
    width: int,
) -> list[ir.Value]:
    """Numbers k, k + 1, … of a row as vectors, `stored.step(width)` of them in all."""
    numbers, *blocks = arrays
    if not stored.block:
        return [load_floats(b, b.gep(numbers, [k]), width)]
    block = b.sdiv(k, INT(stored.block))
    scale, *minimum = (splat(b, b.load(b.gep(of, [block])), width) for of in blocks)
    vectors = []
    for first in range(0, stored.block, width):
        integers = _integers(b, stored, numbers, k, first, width)
        floats = b.sitofp(integers, scale.type)
        if minimum:
            floats = b.call(fused(b.module, width), [floats, scale, *minimum])
        else:
            floats = b.fmul(floats, scale)
        vectors.append(floats)
    return vectors


def _integers(
    b: ir.IRBuilder,
    stored: Storage,
    numbers: ir.Value,
    k: ir.Value,
    first: int,
    width: int,
) -> ir.Value:
    """The integers from `first` on of the block at k, 32 bits each."""
    words = ir.VectorType(ir.IntType(32), width)
    place = b.add(k, INT(first))
    if stored.bits == 4:
        place = b.add(b.lshr(k, INT(1)), INT(first % _HALF_BLOCK))
    kind = ir.VectorType(ir.IntType(8), width).as_pointer()
    loaded = b.load(b.bitcast(b.gep(numbers, [place]), kind))
    loaded.align = 1
    if stored.bits == 8:
        return b.sext(loaded, words)
    wide = b.zext(loaded, words)
    if first < _HALF_BLOCK:
        return b.and_(wide, Repeated(words, 15))
    return b.lshr(wide, Repeated(words, 4))


def expansion(module: ir.Module, stored: Storage, width: int) -> ir.Function:
    """Writes a row as float32. Arguments: its arrays, the result, its length."""
    name = "expansion"
    if name in module.globals:
        return module.globals[name]
    function, b = add_function(module, name, [*kinds_of(stored), FLOATS, INT])
    *arrays, result, length = function.args

    def block(k: ir.Value) -> None:
        for number, vector in enumerate(load(b, stored, arrays, k, width)):
            place = b.gep(result, [b.add(k, INT(number * width))])
            b.store(vector, b.bitcast(place, vector.type.as_pointer())).align = 4

    for_each(b, INT(0), length, stored.step(width), block)
    b.ret_void()
    return function
