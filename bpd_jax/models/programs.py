"""Jitted functions whose compiled programs are kept on disk and run without tracing.

jax's compilation cache saves compiling, but a program must be traced to be found there,
which takes Python seconds for a decode loop. A `Program` is found by what its trace
depends on: the source files of bpd_jax, versions, settings and devices of jax, static
arguments, and the structure, shapes and dtypes of arrays.
"""

import contextlib
import functools
import hashlib
import inspect
import io
import os
import pathlib
import pickle
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
from jax.experimental import serialize_executable
from jax.sharding import SingleDeviceSharding

import bpd_jax
from bpd_jax.base import compiled
from bpd_jax.base.typing import PyTree
from bpd_jax.models import cpu

# Variables that change what compilers do.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

# Settings of jax without which programs are the same.
_IRRELEVANT = re.compile("log|cache|dump|traceback")

# Digests of constants, by identity: they have hundreds of arrays.
_DIGESTS: dict[int, tuple[weakref.ref[Any], bytes | None]] = {}


class Program:
    """A function for `jax.jit`, called with positional arguments only.

    Its programs are kept if `keep_compiled` was called and all arrays are on one
    device; otherwise this is `jax.jit`.

    Args:
      function: the function.
      static: names of its static arguments.
      constants: names of arguments that rarely change: objects that are not mutated.
      donate: names of arguments whose memory the outputs may take.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static: Sequence[str],
        constants: Sequence[str],
        donate: Sequence[str] = (),
    ):
        self._name = function.__qualname__
        self._jitted: Any = jax.jit(
            function, static_argnames=static, donate_argnames=donate
        )
        self.lower = self._jitted.lower
        names = list(inspect.signature(function).parameters)
        self._static = [names.index(name) for name in static]
        self._constants = [names.index(name) for name in constants]
        self._loaded: dict[Any, Callable[..., Any]] = {}
        compiled.on_forget.append(self.clear_cache)

    def clear_cache(self) -> None:
        """Forgets all programs in memory."""
        self._loaded.clear()
        self._jitted.clear_cache()

    def __call__(self, *arguments: Any) -> Any:
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
        if None in constants or None in varying:
            return self._jitted(*arguments)
        key = tuple(constants), tuple(static), tuple(varying)
        if key not in self._loaded:
            self._loaded[key] = self._load(key, arguments)
        return self._loaded[key](
            *(x for i, x in enumerate(arguments) if i not in self._static)
        )

    def _load(self, key: Any, arguments: Sequence[Any]) -> Callable[..., Any]:
        """The program for these arguments, from disk if it is there."""
        lower = functools.partial(self._jitted.lower, *arguments)
        try:
            known = [self._name.encode(), _environment(), _pickled(key)]
        except Exception:  # What cannot be pickled is not kept.
            return lower().compile()
        # Two steps, so that new source files that trace to the same program share it.
        traced = [*known, _sources()]
        device = _device_of(arguments)
        name = compiled.read_kept("trace", traced)
        program = _kept_program(name, device) if name else None
        if program is None:
            lowered = lower()
            name = compiled.digest([*known, lowered.as_text().encode()])
            program = _kept_program(name, device) or _compiled(name, lowered)
            compiled.write_kept("trace", traced, name)
        return program


def _kept_program(name: bytes, device: Any) -> Callable[..., Any] | None:
    """The program that `_compiled` wrote under this name."""
    content = compiled.read_kept("program", [name])
    if content is not None:
        # A program that this version of jax or this device refuses is compiled.
        with contextlib.suppress(Exception):
            kernels, *executable = pickle.loads(content)
            if cpu.load_kernels(kernels):
                load: Any = serialize_executable.deserialize_and_load
                return load(*executable, execution_devices=[device])
    return None


def _compiled(name: bytes, lowered: Any) -> Callable[..., Any]:
    """Compiles a program and writes it to disk."""
    # A CPU cannot write a program again that jax has read from its own cache.
    with compiled.uncached():
        program = lowered.compile()
    # Not all devices can write their programs.
    with contextlib.suppress(Exception):
        executable = serialize_executable.serialize(program)
        kernels = cpu.kernels_of(lowered.as_text())
        compiled.write_kept("program", [name], pickle.dumps((kernels, *executable)))
    return program


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
        parts.append((leaf.shape, leaf.dtype, weak, device))
    return tuple(parts)


def _digest_of(constant: Any) -> bytes | None:
    """The digest of a constant's signature; None where programs are not kept."""
    reference, digest = _DIGESTS.get(id(constant), (None, None))
    if reference is None or reference() is not constant:
        signature = _signature(constant)
        if signature is not None:
            with contextlib.suppress(Exception):  # It cannot be pickled.
                digest = hashlib.sha256(_pickled(signature)).digest()
        _DIGESTS[id(constant)] = weakref.ref(constant), digest
        weakref.finalize(constant, _DIGESTS.pop, id(constant), None)
    return digest


def _pickled(value: Any) -> bytes:
    """The same bytes for equal values, whether or not their parts are one object."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()


@functools.cache
def _sources() -> bytes:
    """A digest of all source files of bpd_jax."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(bpd_jax.__path__[0]).rglob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


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
        (jax.device_count(), cpu.on_cpu(), compiled.processor()),
    )
    return repr(parts).encode()
