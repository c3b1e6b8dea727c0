"""How stored numbers become vectors of float32, in LLVM's intermediate representation.

A vector holds the same word of W outputs, from which their numbers are taken one after
the other. The integers of a quantized matrix become `scale · integer + minimum` in
registers, as `QuantizedMatrix.values` expands them: the product is exact, so one
rounding is left.
"""

from llvmlite import ir

from bpd_jax.cpu.llvm_code import FLOAT, INT, POINTER, Repeated, fused, intrinsic
from bpd_jax.cpu.tile import ARM, Storage

WORD = ir.IntType(32)
WORDS = WORD.as_pointer()


class StoredBlock:
    """A block of W outputs, whose words begin at an address."""

    def __init__(
        self, b: ir.IRBuilder, stored: Storage, width: int, place: ir.Value
    ) -> None:
        self._stored, self._width = stored, width
        self._words, self._floats = (ir.VectorType(x, width) for x in (WORD, FLOAT))
        blocks = [
            b.bitcast(self._load(b, b.gep(place, [INT(number * width)])), self._floats)
            for number in range(stored.integers, stored.words)
        ]
        self._scales = blocks[:1]
        self._minimum = blocks[1] if stored.minima else None
        if stored.bits == 4 and width == 8:
            # The high half of a byte stays in its place, where it is 16 times as large.
            self._scales.append(b.fmul(blocks[0], Repeated(self._floats, 1 / 16)))

    def number(self, b: ir.IRBuilder, place: ir.Value, part: int, j: int) -> ir.Value:
        """Number j of each output in the word at an address.

        The low and the high halves of bytes with packed integers are two parts.
        """
        if self._stored.bits == 32:
            return b.bitcast(self._load(b, place), self._floats)
        if self._stored.bits == 16:
            # The bits of bfloat16 numbers are the high half of float32.
            word = self._load(b, place)
            if j:
                high = b.and_(word, self._repeated(0xFFFF0000))
            else:
                high = b.shl(word, self._repeated(16))
            return b.bitcast(high, self._floats)
        integers = self._integers(b, place, part, j)
        scale = self._scales[min(part, len(self._scales) - 1)]
        if self._minimum is None:
            return b.fmul(integers, scale)
        fma = fused(b.module, self._width)
        return b.call(fma, [integers, scale, self._minimum])

    def _integers(
        self, b: ir.IRBuilder, place: ir.Value, part: int, j: int
    ) -> ir.Value:
        """Byte j of a word, or a half of it, as float32."""
        packed = self._stored.bits == 4
        if self._width == 8:
            # An address that is j bytes higher shifts at no cost.
            mask = 0xF0 if part else 0x0F if packed else 0xFF
            integers = b.and_(self._load(b, place, j), self._repeated(mask))
        elif self._width == ARM and not packed:
            shifted = b.shl(self._load(b, place), self._repeated(24 - 8 * j))
            integers = b.ashr(shifted, self._repeated(24))
        else:
            word = self._load(b, place)
            if shift := 8 * j + 4 * part:
                word = b.lshr(word, self._repeated(shift))
            if packed and self._width == 16:
                # The processor takes the last 4 bits of an index.
                table = ir.Constant(self._floats, [float(i) for i in range(16)])
                kinds = [self._floats, self._words]
                name = "llvm.x86.avx512.permvar.sf.512"
                choose = intrinsic(b.module, name, self._floats, kinds)
                return b.call(choose, [table, word])
            integers = b.and_(word, self._repeated(0x0F if packed else 0xFF))
        if self._stored.offset:
            integers = b.sub(integers, self._repeated(self._stored.offset))
        return b.sitofp(integers, self._floats)

    def _load(self, b: ir.IRBuilder, place: ir.Value, skipped: int = 0) -> ir.Value:
        """The word of each output at an address, after some bytes."""
        if skipped:
            place = b.gep(b.bitcast(place, POINTER), [INT(skipped)])
        loaded = b.load(b.bitcast(place, self._words.as_pointer()))
        loaded.align = 1 if skipped else 4
        return loaded

    def _repeated(self, word: int) -> Repeated:
        return Repeated(self._words, word)
