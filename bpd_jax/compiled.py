"""Compiled programs: kept on disk for the next command, and forgotten in good time."""

import gc
import hashlib
import os
import pathlib
import platform
import sys

# Nothing is gained by keeping what compiles faster than it loads.
_LEAST_SECONDS = 1.0


def keep_compiled() -> None:
    """Lets jax keep what it compiles, in `~/.cache/bpd_jax`.

    Does nothing where `JAX_COMPILATION_CACHE_DIR` is set, even to nothing, or where jax
    has not been imported.
    """
    jax = sys.modules.get("jax")
    if jax is None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "bpd_jax" / "compiled" / processor()
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)


def forget_compiled() -> None:
    """Frees all programs that this process compiled, for it compiles many more.

    On a CPU each takes a dozen memory mappings, of which Linux allows a process 65,530:
    past them the compiler dies.
    """
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.clear_caches()
        gc.collect()


def processor() -> str:
    """A name for this kind of processor.

    Programs for a CPU use the instructions that it has, and a home folder may be shared
    by machines that have others.
    """
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
        flags = next(line for line in text.splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        flags = platform.processor()
    digest = hashlib.blake2b(flags.encode(), digest_size=6).hexdigest()
    return f"{platform.machine()}-{digest}"
