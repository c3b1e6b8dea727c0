"""Jitted functions whose compiled programs are kept on disk and run without tracing.

jax's compilation cache saves compiling, but a program must be traced to be found there,
which takes Python seconds for a decode loop. A `Program` is found by what its trace
depends on: the source files of bpd_jax, versions, settings and devices of jax, static
arguments, and the structure, shapes and dtypes of arrays. Where other code takes part,
such as a drafting method of another package, nothing is kept.
"""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import inspect
import io
import math
import os
import pathlib
import pickle
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax
import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import SingleDeviceSharding

import bpd_jax
from bpd_jax.base import compiled
from bpd_jax.base.host_memory import return_freed_memory
from bpd_jax.base.jax_private import strip_source_lines, trace_context
from bpd_jax.base.typing import PyTree
from bpd_jax.models import device_ops
from bpd_jax.models.device_ops import (
    COMPILER_OPTIONS,
    IN_ORDER,
    compiler_options,
    on_cpu,
)

# Variables that change what compilers do.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

# Settings of jax without which programs are the same.
_IRRELEVANT = re.compile("log|cache|dump|traceback")

# Packages whose versions or source files are a part of the key, and Python's own.
_PACKAGES = {"bpd_jax", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "builtins"}
_PACKAGES |= {"None", "copyreg", "types", "functools", "collections", "enum"}

# Modules that a process has imported may differ from files that are newer.
_STARTED = time.time()

# The threads of `compiled_ahead`, and how many there are.
_THREADS: contextvars.ContextVar[concurrent.futures.Executor | None]
_THREADS = contextvars.ContextVar("threads", default=None)
_MOST_THREADS = 2

# Digests of constants, by identity: they have hundreds of arrays.
_DIGESTS: dict[int, tuple[weakref.ref[Any], bytes | None]] = {}


class Program:
    """A function for `jax.jit`, called with positional arguments only.

    Everything that runs a model while decoding must be one: all are compiled with the
    same options, without which activations would be rounded differently by methods that
    draft on the host.

    Its programs are kept if `keep_compiled` was called and all arrays are on one
    device; otherwise this is `jax.jit`.

    Args:
      function: the function.
      static: names of its static arguments.
      constants: names of arguments that rarely change: objects that are not mutated.
      donate: names of arguments whose memory the outputs may take.
      in_order: for passes over whole texts; see `IN_ORDER` in `device_ops`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static: Sequence[str],
        constants: Sequence[str],
        donate: Sequence[str] = (),
        in_order: bool = False,
    ):
        self._name = function.__qualname__
        self._in_order = in_order
        # Called late, because they depend on the devices.
        self._options = functools.partial(compiler_options, in_order=in_order)
        self._jit = functools.partial(
            jax.jit, function, static_argnames=static, donate_argnames=donate
        )
        self._traced = self._jit()
        self.lower: Any = self._traced.lower
        names = list(inspect.signature(function).parameters)
        self._static = [names.index(name) for name in static]
        self._constants = [names.index(name) for name in constants]
        self._loaded: dict[Any, Any] = {}  # Programs, or `_Compiling`.
        compiled.on_forget.append(self.clear_cache)

    @functools.cached_property
    def _jitted(self) -> Any:
        return self._jit(compiler_options=self._options())

    def clear_cache(self) -> None:
        """Forgets all programs in memory."""
        self._loaded.clear()
        if "_jitted" in vars(self):
            self._jitted.clear_cache()

    def __call__(self, *arguments: Any) -> Any:
        # A part of another program takes its options from there.
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments)):
            return self._traced(*arguments)
        if not compiled.keeps_programs():
            return self._jitted(*arguments)
        constants, static, varying = [], [], []
        for index, argument in enumerate(arguments):
            if index in self._constants:
                constants.append(_digest_of(argument))
            elif index in self._static:
                static.append(argument)
            else:
                varying.append(_signature(argument))
        ahead = _THREADS.get() is not None
        if None in constants or None in varying:
            if ahead:
                raise _NotKept
            return self._jitted(*arguments)
        # The settings that jax compares before it uses what it has traced.
        key = tuple(constants), tuple(static), tuple(varying), trace_context()
        if key not in self._loaded:
            self._loaded[key] = self._load(key, arguments)
            return_freed_memory()
        program = self._loaded[key]
        if ahead:
            return program.out_info
        if isinstance(program, _Compiling):
            program = self._loaded[key] = program.future.result()
        return program(*(x for i, x in enumerate(arguments) if i not in self._static))

    def _load(self, key: Any, arguments: Sequence[Any]) -> Any:
        """The program for these arguments, from disk if it is there."""
        device = _device_of(arguments)
        arguments = jax.tree.map(_anywhere, arguments)
        sources = _sources()
        try:
            pickled = _pickled(key[:-1])
        except Exception:  # Of other packages, or what cannot be pickled.
            sources = None
        if sources is None:
            return self.lower(*arguments).compile(self._options())
        # Two steps, so that new source files that trace to the same program share it.
        settings = re.sub(" at 0x[0-9a-f]+", "", repr(key[-1]))
        settings += f" {self._in_order}"
        known = [self._name.encode(), _environment(), pickled, settings.encode()]
        name = compiled.read_kept("trace", [*known, sources])
        program = _kept_program(name, device) if name else None
        if program is not None:
            return program
        lowered = self.lower(*arguments)

        def compile_() -> Callable[..., Any]:
            name = compiled.digest([*known, lowered.as_text().encode()])
            program, seconds = _kept_program(name, device), math.inf
            if program is None:
                program, seconds = _compiled(name, lowered, self._options())
            if _sources() == sources and seconds >= compiled.LEAST_SECONDS_WHOLE:
                compiled.write_kept("trace", [*known, sources], name)
            return program

        threads = _THREADS.get()
        if threads is None:
            return compile_()
        place = SingleDeviceSharding(device)
        shapes = jax.tree.map(lambda x: x.update(sharding=place), lowered.out_info)
        return _Compiling(shapes, threads.submit(compile_))


@dataclasses.dataclass(frozen=True)
class _Compiling:
    """A program that a thread compiles, and the shapes of its outputs."""

    out_info: PyTree
    future: concurrent.futures.Future[Callable[..., Any]]


class _NotKept(Exception):
    """A program is not kept, so that its outputs are not known before it runs."""


@contextlib.contextmanager
def compiled_ahead() -> Iterator[None]:
    """Programs that this thread calls in the block are traced, and do not run.

    Meanwhile other threads compile those before. A program returns the shapes of its
    outputs, which the next one takes. The block ends early at a program that is not
    kept, and when all are compiled.
    """
    with concurrent.futures.ThreadPoolExecutor(_MOST_THREADS) as threads:
        token = _THREADS.set(threads)
        try:
            with contextlib.suppress(_NotKept):
                yield
        finally:
            _THREADS.reset(token)


def _anywhere(leaf: Any) -> Any:
    """Shapes without a device, as arrays that are on no particular one."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=None)
    return leaf


def _kept_program(name: bytes, device: Any) -> Callable[..., Any] | None:
    """The program that `_compiled` wrote under this name."""
    content = compiled.read_kept("program", [name])
    if content is not None:
        # A program that this version of jax or this device refuses is compiled.
        with contextlib.suppress(Exception):
            kernels, *executable = pickle.loads(content)
            if device_ops.current().load_kernels(kernels):
                load: Any = serialize_executable.deserialize_and_load
                return load(*executable, execution_devices=[device])
    return None


def _compiled(
    name: bytes, lowered: Any, options: dict[str, Any] | None
) -> tuple[Callable[..., Any], float]:
    """Compiles a program, and writes it to disk; also the seconds of compiling."""
    start = time.perf_counter()
    strip_source_lines(lowered)
    # A CPU cannot write a program again that jax has read from its own cache.
    with compiled.uncached():
        program = lowered.compile(options)
    seconds = time.perf_counter() - start
    if seconds < compiled.LEAST_SECONDS_WHOLE:
        return program, seconds
    # Not all devices can write their programs.
    with contextlib.suppress(Exception):
        executable = serialize_executable.serialize(program)
        kernels = device_ops.current().kernels_of(lowered.as_text())
        compiled.write_kept("program", [name], pickle.dumps((kernels, *executable)))
    return program, seconds


def _device_of(arguments: Sequence[Any]) -> Any:
    """The device of the first array that is on one."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(arguments))
    return next((next(iter(s.device_set)) for s in shardings if s), jax.devices()[0])


def _signature(tree: PyTree) -> tuple[Any, ...] | None:
    """What a trace depends on in arrays; None if some are on several devices."""
    leaves, structure = jax.tree.flatten(tree)
    parts: list[Any] = [structure]
    for leaf in leaves:
        sharding: Any = getattr(leaf, "sharding", None)
        if not isinstance(sharding, SingleDeviceSharding | None):
            return None
        device = "" if sharding is None else str(*sharding.device_set)
        weak = getattr(leaf, "weak_type", False)
        # Numbers of Python have a type of their own.
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        parts.append((np.shape(leaf), dtype, weak, device))
    return tuple(parts)


def _digest_of(constant: Any) -> bytes | None:
    """The digest of a constant's signature; None where programs are not kept."""
    reference, digest = _DIGESTS.get(id(constant), (None, None))
    if reference is None or reference() is not constant:
        digest, signature = None, _signature(constant)
        if signature is not None:
            with contextlib.suppress(Exception):  # It cannot be pickled.
                digest = hashlib.sha256(_pickled(signature)).digest()
        _DIGESTS[id(constant)] = weakref.ref(constant), digest
        weakref.finalize(constant, _DIGESTS.pop, id(constant), None)
    return digest


class _Pickler(pickle.Pickler):
    """Refuses classes and functions whose source is not in `_sources` or versions."""

    def reducer_override(self, value: Any) -> Any:
        package = str(getattr(value, "__module__", None)).partition(".")[0]
        if package not in _PACKAGES:
            raise pickle.PicklingError(f"{value!r} is of {package}")
        return NotImplemented


def _pickled(value: Any) -> bytes:
    """The same bytes for equal values, whether or not their parts are one object."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()


def _sources() -> bytes | None:
    """A digest of bpd_jax's source files; None if some are newer than this process."""
    paths = sorted(pathlib.Path(bpd_jax.__path__[0]).rglob("*.py"))
    if max(path.stat().st_mtime for path in paths) > _STARTED:
        return None
    return compiled.digest([path.read_bytes() for path in paths])


def _environment() -> bytes:
    """What programs depend on, apart from their arguments."""
    device = jax.devices()[0]
    parts = (
        (jax.__version__, jax.lib.__version__, flax.__version__),
        [
            (name, str(value))
            for name, value in sorted(jax.config.values.items())
            if not _IRRELEVANT.search(name)
        ],
        [os.environ.get(name) for name in _VARIABLES],
        (device.platform, device.device_kind, device.client.platform_version),
        (jax.device_count(), on_cpu(), device_ops.current().multiplies_quantized(None)),
        (np.__version__, sys.version, compiled.processor()),
        (COMPILER_OPTIONS, IN_ORDER),
    )
    return repr(parts).encode()
