"""What is compiled: few lengths, kept on disk between processes, freed in memory."""

import contextlib
import functools
import gc
import hashlib
import os
import pathlib
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from bpd_jax.base.errors import warn

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
    empty, nothing is kept, and nothing is without a home folder or in one that others
    can write. Does nothing if jax has not been imported.
    """
    global _keeps
    jax = sys.modules.get("jax")
    if jax is None:
        return
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = cache_folder()
        folder = None if cache is None else str(cache / "compiled" / processor())
        if folder and not (_is_trusted(folder) and os.access(folder, os.W_OK)):
            folder = None
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    folder = jax.config.jax_compilation_cache_dir
    if folder and "://" not in folder and not _is_trusted(folder):
        folder = None
        jax.config.update("jax_compilation_cache_dir", None)
    _keeps = bool(folder) and bool(jax.config.jax_enable_compilation_cache)


def cache_folder() -> pathlib.Path | None:
    """The folder of what is kept between processes; None without a home folder."""
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return None if cache.startswith("~") else pathlib.Path(cache, "bpd_jax")


@functools.cache
def _is_trusted(folder: str) -> bool:
    """Whether only this user or root can write to a folder, which is made if missing.

    What is kept there is executed. Otherwise there is a warning.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(folder)), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        status = os.stat(folder)
    except OSError:
        return False
    trusted = status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022
    if not trusted:
        warn(
            f"compiled programs are not kept in {folder}, because others can write to "
            f"it: remove it, or make it yours alone (chmod 700 {folder})."
        )
    return trusted


def keeps_programs() -> bool:
    """Whether `keep_compiled` has enabled a cache in this process."""
    return _keeps


def read_kept(kind: str, key: Sequence[bytes]) -> bytes | None:
    """What `write_kept` wrote under this key, if it is there and undamaged."""
    with contextlib.suppress(OSError):
        path = _kept_file(kind, key)
        content = path.read_bytes()
        if digest([path.name.encode(), content[_DIGEST:]]) == content[:_DIGEST]:
            return content[_DIGEST:]
    return None


def write_kept(kind: str, key: Sequence[bytes], content: bytes) -> None:
    """Writes to a file of jax's cache folder, if there is one and it can be written.

    Code of a damaged file, or of one under another's name, would crash the process, so
    it begins with a digest of both.
    """
    with contextlib.suppress(OSError):
        path = _kept_file(kind, key)
        temporary = path.with_name(f".bpd_jax-{path.name}.{os.getpid()}.part")
        temporary.write_bytes(digest([path.name.encode(), content]) + content)
        temporary.replace(path)


def _kept_file(kind: str, key: Sequence[bytes]) -> pathlib.Path:
    folder = getattr(sys.modules.get("jax"), "config", None)
    folder = getattr(folder, "jax_compilation_cache_dir", None)
    if not folder or "://" in folder or not _is_trusted(folder):
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
