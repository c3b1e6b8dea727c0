"""What is compiled: few lengths, kept on disk between processes, freed in memory."""

import contextlib
import gc
import hashlib
import os
import pathlib
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

# Programs that compile faster than they load are not cached: those of jax, which must
# be traced to be loaded, and whole ones.
_LEAST_SECONDS, LEAST_SECONDS_WHOLE = 1.0, 0.2

# Bytes of a digest.
_DIGEST = 32

# Lengths that programs are compiled for are multiples of it.
_STEP = 32

# Called by `forget_compiled`.
on_forget: list[Callable[[], object]] = []

# Whether `keep_compiled` has found a cache.
_keeps = False

# An element for every thread in `uncached`.
_uncached: list[bool] = []
_LOCK = threading.Lock()


def keep_compiled() -> None:
    """Enables jax's compilation cache, in which whole programs are kept too.

    It is in `~/.cache/bpd_jax`, or where `JAX_COMPILATION_CACHE_DIR` says; if that is
    empty, nothing is kept. Does nothing if jax has not been imported.
    """
    global _keeps
    jax = sys.modules.get("jax")
    if jax is None:
        return
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        folder = cache.expanduser() / "bpd_jax" / "compiled" / processor()
        jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    has_folder = bool(jax.config.jax_compilation_cache_dir)
    _keeps = has_folder and bool(jax.config.jax_enable_compilation_cache)


def keeps_programs() -> bool:
    """Whether `keep_compiled` has enabled a cache in this process."""
    return _keeps


def read_kept(kind: str, key: Sequence[bytes]) -> bytes | None:
    """What `write_kept` wrote under this key, if it is there and undamaged."""
    with contextlib.suppress(OSError):
        content = _kept_file(kind, key).read_bytes()
        if hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
            return content[_DIGEST:]
    return None


def write_kept(kind: str, key: Sequence[bytes], content: bytes) -> None:
    """Writes to a file of jax's cache folder, if there is one and it can be written.

    Code of a damaged file would crash the process, so it begins with a digest.
    """
    with contextlib.suppress(OSError):
        path = _kept_file(kind, key)
        temporary = path.with_name(f".bpd_jax-{path.name}.{os.getpid()}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(content).digest() + content)
        temporary.replace(path)


def _kept_file(kind: str, key: Sequence[bytes]) -> pathlib.Path:
    folder = getattr(sys.modules.get("jax"), "config", None)
    folder = getattr(folder, "jax_compilation_cache_dir", None)
    if not folder or "://" in folder:
        raise FileNotFoundError("there is no cache folder on the disk")
    return pathlib.Path(folder) / f"{kind}-{digest(key).hex()}"


def digest(parts: Sequence[bytes]) -> bytes:
    """A digest of some texts, which are not merely joined."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "big") + part)
    return total.digest()


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Programs that are compiled in this block are not read from jax's cache."""
    with _LOCK:
        _uncached.append(True)
        _enable_cache(False)
    try:
        yield
    finally:
        with _LOCK:
            _uncached.pop()
            if not _uncached:  # The last thread.
                _enable_cache(True)


def _enable_cache(enabled: bool) -> None:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()  # jax looks at the setting only once.


def forget_compiled() -> None:
    """Frees all programs that this process has compiled, before it compiles many more.

    On a CPU each takes a dozen memory mappings, of which Linux allows a process 65,530;
    beyond that the compiler crashes.
    """
    jax = sys.modules.get("jax")
    if jax is not None:
        for forget in on_forget:
            forget()
        jax.clear_caches()
        gc.collect()


def processor() -> str:
    """A name for this kind of processor.

    Programs use the instructions of the CPU, and machines with different CPUs may share
    a home folder.
    """
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
        # x86 and ARM.
        names = "flags", "Features"
        flags = next(line for line in text.splitlines() if line.startswith(names))
    except (OSError, StopIteration):
        flags = platform.processor()
    name = hashlib.blake2b(flags.encode(), digest_size=6).hexdigest()
    return f"{platform.machine()}-{name}"


def padded_length(length: int, per_octave: int = 8, shortest: int = _STEP) -> int:
    """The smallest of few lengths that is at least `length`; all are multiples of 32.

    Between a number and its double there are at most `per_octave` of them.

    >>> [padded_length(n) for n in (1, 33, 500, 520, 1000, 1100)]
    [32, 64, 512, 576, 1024, 1152]
    >>> [padded_length(n, per_octave=2) for n in (1, 65, 97, 150, 1000)]
    [32, 96, 128, 192, 1024]
    """
    power = 1 << max(length - 1, 0).bit_length()
    step = max(_STEP, power // (2 * per_octave))
    return max(-(-length // step) * step, shortest)
