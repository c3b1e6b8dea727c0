"""The machine code of `attention_kernel`, as LLVM's intermediate representation.

A tile of queries gets the scores of all slots and new keys, then their exponentials and
sums, then the weighted values. Rows of queries do not influence each other.
"""

import functools
import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from bpd_jax.cpu.llvm_code import (
    FLOATS,
    HALVES,
    INT,
    POINTER,
    Repeated,
    accumulate,
    add_function,
    call_for,
    even_part,
    for_each,
    intrinsic,
    reduce_vector,
    smaller,
    whole_parts,
)
from bpd_jax.cpu.tile import Tile
from bpd_jax.cpu.vector_code import VectorCode
from bpd_jax.cpu.xla_kernel import Buffers, Split, kernel_module

_WORD, _BYTE = ir.IntType(32), ir.IntType(8)
_WORDS = _WORD.as_pointer()
_SINGLE = 1 << 15  # A call of fewer products is processed by one thread.


def attention_module(
    tile: Tile, width: int, softcap: float | None, half: bool
) -> ir.Module:
    """The kernel as LLVM's intermediate representation.

    Arguments of `handler`: queries `[B, K, M, H]`, new keys `[B, K, H, U]` and values
    `[B, K, U, H]`, which of them a query sees, int8 `[B, M, U]`, keys `[B, K, H, S]`
    and values `[B, K, S, H]` of the cache, its lengths, and the first visible slots
    `[B, M]`; its result: `[B, K, M, H]`. If `half`, the cache is bfloat16. A tile is of
    rows of queries and vectors of slots; its width divides `width`, H.
    """
    stored = HALVES if half else FLOATS
    kinds = [FLOATS, FLOATS, FLOATS, POINTER, stored, stored, _WORDS, _WORDS, FLOATS]

    def split(b: ir.IRBuilder, buffers: Buffers) -> Split:
        batch, heads, rows = (buffers.size(0, axis) for axis in range(3))
        new, slots = buffers.size(1, 3), buffers.size(4, 3)
        tiles = whole_parts(b, rows, tile.rows)
        chunks = b.mul(b.mul(batch, heads), tiles)
        products = b.mul(b.mul(chunks, b.add(slots, new)), INT(width))
        return Split(
            values=[
                *map(buffers.data, range(9), kinds),
                heads,
                rows,
                new,
                slots,
                tiles,
            ],
            chunks=chunks,
            alone=b.icmp_signed("<", products, INT(_SINGLE)),
        )

    def run(b: ir.IRBuilder, values: Sequence[ir.Value], chunk: ir.Value) -> None:
        queries, keys, added, seen, cached_keys, cached, lengths, *sizes = values
        starts, out, heads, rows, new, slots, tiles = sizes
        item, index = b.sdiv(chunk, tiles), b.srem(chunk, tiles)
        text = b.sdiv(item, heads)
        first, count = even_part(b, index, rows, tiles)
        visible = smaller(b, b.sext(b.load(b.gep(lengths, [text])), INT), slots)
        row = b.mul(b.add(b.mul(item, rows), first), INT(width))
        in_text = b.add(b.mul(text, rows), first)
        of_new, of_cache = (
            b.mul(b.mul(item, size), INT(width)) for size in (new, slots)
        )
        arguments = [
            b.gep(queries, [row]),
            b.gep(keys, [of_new]),
            b.gep(added, [of_new]),
            b.gep(seen, [b.mul(in_text, new)]),
            b.gep(cached_keys, [of_cache]),
            b.gep(cached, [of_cache]),
            b.gep(starts, [in_text]),
            b.gep(out, [row]),
            *(new, slots, visible),
        ]

        def function_of(rows: int) -> ir.Function:
            size = Tile(tile.width, tile.outputs, rows)
            return _Rows(b.module, size, width, stored, softcap).function

        call_for(b, count, tile.rows, function_of, arguments)

    kinds += [INT] * 5
    return kernel_module("attention_kernel", 8, 1, split, kinds, run, [4, 5])


class _Rows(VectorCode):
    """The function for a fixed number of rows of queries of a head.

    Its arguments: queries, new keys and values, those that are seen, keys and values of
    the cache, the first visible slots, the result, U, S, and the number of slots that
    hold tokens.
    """

    def __init__(
        self,
        module: ir.Module,
        tile: Tile,
        width: int,
        stored: ir.Type,
        softcap: float | None,
    ) -> None:
        super().__init__(module, tile, width)
        self.softcap = softcap
        kinds = [FLOATS, FLOATS, FLOATS, POINTER, stored, stored, _WORDS, FLOATS]
        self.function, self.b = add_function(
            module, f"rows_{tile.rows}", [*kinds, *[INT] * 3]
        )
        for pointer in self.function.args[:8]:
            pointer.add_attribute("noalias")
        self.queries, self.keys, self.added, self.seen = self.function.args[:4]
        self.cached_keys, self.cached, self.starts, self.out = self.function.args[4:8]
        self.new, self.slots, self.visible = self.function.args[8:]
        self._emit()

    def _emit(self) -> None:
        b, wide = self.b, self.tile.width
        padded, more = (self._up(size) for size in (self.visible, self.new))
        # Scores, later weights, of each row: those of slots, then those of new keys.
        self.stride = b.add(padded, more)
        malloc = intrinsic(self.module, "malloc", POINTER, [INT])
        rows = b.mul(self.stride, INT(self.tile.rows))
        # After them the weights of visible new keys of one row, behind those slots
        # that do not fill a vector.
        self.size = b.add(rows, b.add(more, INT(2 * wide)))
        memory = b.call(malloc, [b.mul(self.size, INT(4))])
        self.weights = b.bitcast(memory, FLOATS)
        self.packed = b.gep(self.weights, [rows])
        self.behind = padded
        self.begin = self._first_vector()
        none = [self._constant(-math.inf)] * self.tile.rows
        peaks = self._all_scores(
            self.cached_keys,
            self.slots,
            self.visible,
            INT(0),
            self._in_window,
            none,
            self.begin,
        )
        peaks = self._all_scores(
            self.keys, self.new, self.new, padded, self._is_seen, peaks, INT(0)
        )
        totals = []
        for m, peak in zip(self.rows, peaks, strict=True):
            greatest = self._spread(reduce_vector(b, peak, self._greater))
            totals.append(self._spread(self._weigh(m, greatest)))
        self._mix(totals)
        b.call(intrinsic(self.module, "free", ir.VoidType(), [POINTER]), [memory])
        b.ret_void()

    def _first_vector(self) -> ir.Value:
        """The first slot of the first vector that has a visible one of some row.

        Of the slots before it nothing is read; their weights would be 0.
        """
        b = self.b
        starts = [b.load(b.gep(self.starts, [INT(m)])) for m in self.rows]
        first = functools.reduce(functools.partial(smaller, b), starts)
        first = smaller(b, b.sext(first, INT), self.visible)
        negative = b.icmp_signed("<", first, INT(0))
        first = b.select(negative, INT(0), first)
        return b.and_(first, INT(-self.tile.width))

    def _up(self, size: ir.Value) -> ir.Value:
        """A size in whole vectors."""
        wide = self.tile.width
        return self.b.and_(self.b.add(size, INT(wide - 1)), INT(-wide))

    def _all_scores(
        self,
        keys: ir.Value,
        stride: ir.Value,
        size: ir.Value,
        place: ir.Value,
        visible: Callable[[ir.Value, int], ir.Value],
        peaks: list[ir.Value],
        begin: ir.Value,
    ) -> list[ir.Value]:
        """Writes scores of keys from `begin` on at `place`; the greatest by lane."""
        b, wide = self.b, self.tile.width

        def scores(
            first: ir.Value,
            state: list[ir.Value],
            *,
            vectors: int,
            masked: bool,
        ) -> list[ir.Value]:
            exist = self._mask(first, size) if masked else None
            of_keys = keys, stride, first
            rows = self._scores(self.queries, *of_keys, vectors, exist)
            state = list(state)
            for m in self.rows:
                for v in range(vectors):
                    at = b.add(first, INT(v * wide))
                    score = self._capped(rows[m * vectors + v])
                    shown = visible(at, m)
                    if exist is not None:
                        shown = b.and_(shown, exist)
                    score = b.select(shown, score, self._constant(-math.inf))
                    self._store(score, self.weights, self._at(m, b.add(place, at)))
                    state[m] = self._greater(state[m], score)
            return state

        return self._by_vectors(begin, size, peaks, scores)

    def _capped(self, score: ir.Value) -> ir.Value:
        if self.softcap is None:
            return score
        b, number = self.b, self._constant
        words = ir.VectorType(_WORD, self.tile.width)
        bits = b.bitcast(score, words)
        size = b.and_(bits, Repeated(words, 0x7FFFFFFF))
        sign = b.and_(bits, Repeated(words, 0x80000000))
        power = b.fmul(b.bitcast(size, self.vector), number(-2 / self.softcap))
        power = self._exp(power)
        tanh = b.fdiv(b.fsub(number(1.0), power), b.fadd(number(1.0), power))
        tanh = b.bitcast(b.fmul(tanh, number(self.softcap)), words)
        return b.bitcast(b.or_(tanh, sign), self.vector)

    def _in_window(self, at: ir.Value, m: int) -> ir.Value:
        """Which slots of a vector are not before the first visible one."""
        b = self.b
        words = ir.VectorType(_WORD, self.tile.width)
        lanes = ir.Constant(words, list(range(self.tile.width)))
        start = b.load(b.gep(self.starts, [INT(m)]))
        start = b.sub(start, b.trunc(at, _WORD))
        return b.icmp_signed(">=", lanes, self._spread(start))

    def _is_seen(self, at: ir.Value, m: int) -> ir.Value:
        """Which new keys of a vector a row sees."""
        b, wide = self.b, self.tile.width
        zeros = Repeated(ir.VectorType(_BYTE, wide), 0)
        place = b.gep(self.seen, [b.add(b.mul(self.new, INT(m)), at)])
        exist = self._mask(at, self.new)
        loaded = self._masked(place, "i8", 1, exist, zeros)
        return b.icmp_signed("!=", loaded, zeros)

    def _weigh(self, m: int, peak: ir.Value) -> ir.Value:
        """Turns the scores of a row into weights; returns their sum.

        Weights are added as if the visible new keys were the next slots.
        """
        b, wide = self.b, self.tile.width

        def weigh(at: ir.Value) -> tuple[ir.Value, ir.Value]:
            place = self._at(m, at)
            score = self._load(self.weights, place)
            # NaN counts, so that it shows in the result.
            shown = b.fcmp_unordered(">", score, self._constant(-math.inf))
            weight = self._exp(b.fsub(score, peak))
            weight = b.select(shown, weight, self._constant(0.0))
            self._store(weight, self.weights, place)
            return weight, shown

        full, sums = accumulate(
            b,
            self.begin,
            self.visible,
            wide,
            [self._constant(0.0)],
            lambda at, sums: [b.fadd(sums[0], weigh(at)[0])],
        )
        count = b.sub(self.visible, full)
        with b.if_then(b.icmp_signed(">", count, INT(0))):
            self._store(weigh(full)[0], self.packed, INT(0))
        bits = ir.VectorType(ir.IntType(1), wide)
        kinds = [self.vector, FLOATS, bits]
        name = f"llvm.masked.compressstore.v{wide}f32"
        store = intrinsic(self.module, name, ir.VoidType(), kinds)
        of_bits = ir.IntType(wide)
        ones = intrinsic(self.module, f"llvm.ctpop.i{wide}", of_bits, [of_bits])

        def pack(at: ir.Value, count: list[ir.Value]) -> list[ir.Value]:
            weight, shown = weigh(b.add(self.behind, at))
            b.call(store, [weight, b.gep(self.packed, count), shown])
            number = b.call(ones, [b.bitcast(shown, of_bits)])
            return [b.add(count[0], b.zext(number, INT))]

        more = self._up(self.new)
        _, counts = accumulate(b, INT(0), more, wide, [count], pack)

        def last(at: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            exist = self._mask(at, counts[0])
            weight = self._load(self.packed, at)
            weight = b.select(exist, weight, self._constant(0.0))
            return [b.fadd(sums[0], weight)]

        stop = self._up(counts[0])
        _, sums = accumulate(b, INT(0), stop, wide, sums, last)
        return reduce_vector(b, sums[0], b.fadd)

    def _mix(self, totals: list[ir.Value]) -> None:
        """Adds the weighted values of slots, then of new keys."""
        b, wide = self.b, self.tile.width
        vectors = math.gcd(self.width // wide, self.tile.outputs)

        def part(first: ir.Value) -> None:
            def add(
                values: ir.Value, behind: ir.Value, j: ir.Value, sums: list[ir.Value]
            ) -> list[ir.Value]:
                def weight(m: int) -> ir.Value:
                    return b.gep(self.weights, [self._at(m, b.add(behind, j))])

                start = b.add(b.mul(j, INT(self.width)), first)
                return self._add_products(values, start, sums, weight)

            sums = [self._constant(0.0)] * (self.tile.rows * vectors)
            for values, behind, begin, count in (
                (self.cached, INT(0), self.begin, self.visible),
                (self.added, self.behind, INT(0), self.new),
            ):
                one = functools.partial(add, values, behind)
                _, sums = accumulate(b, begin, count, 1, sums, one)
            for m in self.rows:
                for v in range(vectors):
                    place = b.add(first, INT(m * self.width + v * wide))
                    mixed = b.fdiv(sums[m * vectors + v], totals[m])
                    self._store(mixed, self.out, place)

        for_each(b, INT(0), INT(self.width), vectors * wide, part)

    def _at(self, m: int, place: ir.Value) -> ir.Value:
        """Where the weight of a row is."""
        return self.b.add(self.b.mul(self.stride, INT(m)), place)
