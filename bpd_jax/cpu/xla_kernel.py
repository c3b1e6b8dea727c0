"""Kernels for the CPU, written in LLVM's intermediate representation and run by XLA.

XLA calls them through its foreign function interface, whose structs are declared in
`xla/ffi/api/c_api.h` under `jax.ffi.include_dir()`: the offsets below are in bytes, on
machines of 64 bits. XLA promises to support this version of the interface for a year
after the next one.

The work of a call is split into chunks. The threads of XLA and the calling thread claim
one chunk after another; the calling thread never waits for a thread that has not begun.
"""

import functools
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import llvmlite
from llvmlite import binding, ir

from bpd_jax.base.compiled import read_kept, write_kept
from bpd_jax.cpu.llvm_code import (
    FLOATS,
    INT,
    POINTER,
    add_function,
    for_each,
    intrinsic,
)
from bpd_jax.cpu.tile import processor_features

_NULL = ir.Constant(POINTER, None)
_WORDS = ir.IntType(32).as_pointer()

# Functions in XLA_FFI_Api.
_ERROR_DESTROY, _SCHEDULE, _NUM_THREADS = 64, 136, 144

# Fields of the state of a call that threads share, followed by the values of the call;
# 8 bytes each.
_FIELDS = ("next", "done", "users", "chunks", "before")

# The engines that own the machine code of registered kernels, by name. XLA calls the
# code until the process ends.
_ENGINES: dict[str, Any] = {}
_LOCK = threading.Lock()


class Split(NamedTuple):
    """The work of one call.

    Attributes:
      values: inputs of every chunk: pointers and integers of 64 bits.
      chunks: number of chunks.
      alone: whether the calling thread processes all chunks.
      before: number of the first chunks, which the others wait for.
    """

    values: Sequence[ir.Value]
    chunks: ir.Value
    alone: ir.Value
    before: ir.Value = INT(0)


class Buffers:
    """The arguments of a call, followed by its results.

    `chosen` are the numbers of arguments of which a call has several, one of each for
    every layer; see `operands`.
    """

    def __init__(
        self,
        b: ir.IRBuilder,
        frame: ir.Value,
        inputs: int,
        results: int,
        chosen: Sequence[int] = (),
    ):
        self._builder = b
        arguments, outputs = (_at(b, frame, offset, POINTER) for offset in (72, 112))
        plain = [i for i in range(inputs) if i not in chosen]
        places = {i: INT(place) for place, i in enumerate(plain)}
        if chosen:
            index = _at(b, _at(b, arguments, 8 * len(plain), POINTER), 24, _WORDS)
            layer = b.sext(b.load(index), INT)
            first = b.add(b.mul(layer, INT(len(chosen))), INT(len(plain) + 1))
            places |= {i: b.add(first, INT(n)) for n, i in enumerate(chosen)}
        sources = [(arguments, places[i]) for i in range(inputs)]
        sources += [(outputs, INT(i)) for i in range(results)]
        self._buffers = [
            _at(b, b.gep(base, [b.mul(place, INT(8))]), 0, POINTER)
            for base, place in sources
        ]

    def data(self, index: int, kind: ir.Type = FLOATS) -> ir.Value:
        return _at(self._builder, self._buffers[index], 24, kind)

    def size(self, index: int, axis: int) -> ir.Value:
        sizes = _at(self._builder, self._buffers[index], 40, INT.as_pointer())
        return self._builder.load(self._builder.gep(sizes, [INT(axis)]))


def kernel_module(
    name: str,
    inputs: int,
    results: int,
    split: Callable[[ir.IRBuilder, Buffers], Split],
    kinds: Sequence[ir.Type],
    run: Callable[[ir.IRBuilder, Sequence[ir.Value], ir.Value], None],
    chosen: Sequence[int] = (),
) -> ir.Module:
    """A module whose function `handler` is a target of XLA.

    Args:
      split: emits code that splits a call into chunks.
      kinds: of the values in `Split.values`.
      run: emits code that computes one chunk, from those values and its index.
      chosen: the arguments that a call chooses; see `Buffers`.
    """
    module = ir.Module(name)
    chunk, b = add_function(module, "chunk", [*kinds, INT])
    run(b, chunk.args[:-1], chunk.args[-1])
    b.ret_void()
    work = _add_work(module, chunk)
    function = ir.Function(module, ir.FunctionType(POINTER, [POINTER]), "handler")
    (frame,) = function.args
    b = ir.IRBuilder(function.append_basic_block("entry"))
    extension = _at(b, frame, 8, POINTER)
    with b.if_then(b.icmp_unsigned("!=", extension, _NULL)):
        # XLA queries the version of the interface (0.3) and the traits of the kernel.
        metadata = _at(b, extension, 24, POINTER)
        for offset, number in ((24, 0), (28, 3), (32, 0)):
            _put(b, metadata, offset, ir.IntType(32)(number))
        b.ret(_NULL)
    work_of_call = split(b, Buffers(b, frame, inputs, results, chosen))
    values, chunks = work_of_call.values, work_of_call.chunks
    with b.if_then(work_of_call.alone):
        for_each(b, INT(0), chunks, 1, lambda i: b.call(chunk, [*values, i]))
        b.ret(_NULL)
    _share(b, module, frame, work, work_of_call)
    b.ret(_NULL)
    return module


def registered() -> list[str]:
    return list(_ENGINES)


def register(name: str, build: Callable[[], ir.Module] | None = None) -> bool:
    """Compiles a module's `handler` and registers it as a target of XLA, once.

    Programs may be traced in several threads at the same time. Machine code is kept on
    disk beside the programs that XLA compiles; False if it is not and `build` is None.
    """
    with _LOCK:
        if name not in _ENGINES:
            engine = _compile(name, build)
            if engine is None:
                return False
            code = jax.ffi.pycapsule(engine.get_function_address("handler"))
            jax.ffi.register_ffi_target(name, code, platform="cpu")
            _ENGINES[name] = engine
    return True


def _compile(name: str, build: Callable[[], ir.Module] | None) -> Any | None:
    """Returns the engine that owns the machine code of a module, if it can be had."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    # No processor is named: for some, LLVM would split the widest registers in two.
    features = processor_features().flatten()
    machine = binding.Target.from_default_triple().create_target_machine(
        features=features, opt=3
    )
    key = [llvmlite.__version__, features, name, *_source_files()]
    parts = [part.encode() for part in key]
    code = read_kept("kernel", parts)
    if code is None:
        if build is None:
            return None
        # Loops are written as they should be run: LLVM's passes, which take longer
        # than the rest, are left out.
        module = binding.parse_assembly(str(build()))
        module.verify()
        code = machine.emit_object(module)
        write_kept("kernel", parts, code)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


@functools.cache
def _source_files() -> list[str]:
    """The source that builds kernels: all files of this package."""
    folder = pathlib.Path(__file__).parent
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))]


def _at(b: ir.IRBuilder, base: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
    """Reads from `base + offset` bytes."""
    return b.load(b.bitcast(b.gep(base, [INT(offset)]), kind.as_pointer()))


def _put(b: ir.IRBuilder, base: ir.Value, offset: int, value: ir.Value) -> None:
    """Writes to `base + offset` bytes."""
    b.store(value, b.bitcast(b.gep(base, [INT(offset)]), value.type.as_pointer()))


def _field(b: ir.IRBuilder, state: ir.Value, name: str) -> ir.Value:
    offset = 8 * _FIELDS.index(name)
    return b.bitcast(b.gep(state, [INT(offset)]), INT.as_pointer())


def _add_work(module: ir.Module, chunk: ir.Function) -> ir.Function:
    """Worker loop of a thread: claims chunks until none is left, then leaves the state.

    The last thread that leaves frees it. Argument: the state.
    """
    free = intrinsic(module, "free", ir.VoidType(), [POINTER])
    function, b = add_function(module, "work", [POINTER])
    (state,) = function.args
    claim, wait, compute, leave = (
        function.append_basic_block(name)
        for name in ("claim", "wait", "compute", "leave")
    )
    chunks, before = (b.load(_field(b, state, x)) for x in ("chunks", "before"))
    values = [
        _at(b, state, 8 * (len(_FIELDS) + i), argument.type)
        for i, argument in enumerate(chunk.args[:-1])
    ]
    b.branch(claim)
    b.position_at_end(claim)
    index = b.atomic_rmw("add", _field(b, state, "next"), INT(1), "monotonic")
    b.cbranch(b.icmp_signed("<", index, chunks), wait, leave)
    b.position_at_end(wait)
    # Threads work on those already, as chunks are claimed in order.
    done = b.load_atomic(_field(b, state, "done"), "acquire", 8)
    first = b.icmp_signed("<", index, before)
    b.cbranch(b.or_(first, b.icmp_signed(">=", done, before)), compute, wait)
    b.position_at_end(compute)
    b.call(chunk, [*values, index])
    b.atomic_rmw("add", _field(b, state, "done"), INT(1), "release")
    b.branch(claim)
    b.position_at_end(leave)
    _leave(b, state, free)
    b.ret_void()
    return function


def _leave(b: ir.IRBuilder, state: ir.Value, free: ir.Function) -> None:
    """Releases one reference to the state; the last one frees it."""
    users = b.atomic_rmw("sub", _field(b, state, "users"), INT(1), "acq_rel")
    with b.if_then(b.icmp_signed("==", users, INT(1))):
        b.call(free, [state])


def _share(
    b: ir.IRBuilder,
    module: ir.Module,
    frame: ir.Value,
    work: ir.Function,
    split: Split,
) -> None:
    """Works on this thread and on those of XLA that are idle."""
    values, chunks = split.values, split.chunks
    malloc = intrinsic(module, "malloc", POINTER, [INT])
    interface, context = _at(b, frame, 16, POINTER), _at(b, frame, 24, POINTER)
    call = ir.FunctionType(POINTER, [POINTER]).as_pointer()

    def ask(offset: int, *arguments: ir.Value) -> ir.Value:
        """Calls a function of XLA; returns its error, or null."""
        struct = b.bitcast(stack, POINTER)
        size = 8 * (2 + len(arguments))
        for i, value in enumerate((INT(size), _NULL, *arguments)):
            _put(b, struct, 8 * i, value)
        return b.call(_at(b, interface, offset, call), [struct])

    with b.goto_entry_block():
        stack = b.alloca(ir.ArrayType(INT, 5))
        threads = b.alloca(INT)
    b.store(INT(1), threads)
    ask(_NUM_THREADS, context, b.bitcast(threads, POINTER))
    helpers = b.sub(b.load(threads), INT(1))
    most = b.sub(chunks, INT(1))
    helpers = b.select(b.icmp_signed("<", helpers, most), helpers, most)
    state = b.call(malloc, [INT(8 * (len(_FIELDS) + len(values)))])
    # This thread holds two references: for its work, and to wait for the others.
    users = b.add(helpers, INT(2))
    fields = INT(0), INT(0), users, chunks, split.before
    for i, value in enumerate([*fields, *values]):
        _put(b, state, 8 * i, value)
    free = intrinsic(module, "free", ir.VoidType(), [POINTER])

    def schedule(_: ir.Value) -> None:
        task = b.bitcast(work, POINTER)
        error = ask(_SCHEDULE, context, task, state)
        with b.if_then(b.icmp_unsigned("!=", error, _NULL)):
            ask(_ERROR_DESTROY, error)
            _leave(b, state, free)  # No thread will run this task.

    for_each(b, INT(0), helpers, 1, schedule)
    b.call(work, [state])
    wait = b.function.append_basic_block("wait")
    end = b.function.append_basic_block("end")
    b.branch(wait)
    b.position_at_end(wait)
    done = b.load_atomic(_field(b, state, "done"), "acquire", 8)
    b.cbranch(b.icmp_signed("==", done, chunks), end, wait)
    b.position_at_end(end)
    _leave(b, state, free)
