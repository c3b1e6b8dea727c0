"""The cache of compiled programs on disk, and freeing them in memory."""

import gc
import hashlib
import os
import pathlib
import platform
import sys

# Programs that compile faster than they load are not cached.
_LEAST_SECONDS = 1.0


def keep_compiled() -> None:
    """Enables jax's compilation cache in `~/.cache/bpd_jax`.

    Does nothing if `JAX_COMPILATION_CACHE_DIR` is set, even if empty, or if jax has not
    been imported.
    """
    jax = sys.modules.get("jax")
    if jax is None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "bpd_jax" / "compiled" / processor()
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)


def forget_compiled() -> None:
    """Frees all programs that this process has compiled, before it compiles many more.

    On a CPU each takes a dozen memory mappings, of which Linux allows a process 65,530;
    beyond that the compiler crashes.
    """
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.clear_caches()
        gc.collect()


def processor() -> str:
    """A name for this kind of processor.

    Programs use the instructions of the CPU, and machines with different CPUs may share
    a home folder.
    """
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
        flags = next(line for line in text.splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        flags = platform.processor()
    digest = hashlib.blake2b(flags.encode(), digest_size=6).hexdigest()
    return f"{platform.machine()}-{digest}"
