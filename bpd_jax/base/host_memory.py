"""The host's memory, reused by programs that need the same large arrays at every step.

The GNU C library returns arrays of 32 MB or more to the kernel when they are freed, and
the kernel clears every page of the next one again, which takes a large part of the time
of training on a CPU.
"""

import ctypes
import os
import pathlib
import sys

# Parameters of `mallopt`, from <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
# Device files of NVIDIA and AMD GPUs and of TPUs.
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "accel*", "vfio/[0-9]*")
_PAD = 256 * 2**20  # bytes
# With more, the threads would wait for one another whenever they allocate.
_FEW_CORES = 16


def keep_freed_memory() -> None:
    """Keeps freed arrays in this process for reuse, from now on.

    Call it before jax starts its threads; later it has little effect. The process then
    keeps at least as much memory as it has ever used at once. Does nothing with other C
    libraries, if a variable of the allocator, such as `MALLOC_ARENA_MAX`, is set, or if
    there is a device file of an accelerator and `JAX_PLATFORMS` is not `cpu`.

    Source: mallopt(3) of the Linux manual.
    """
    if os.environ.get("JAX_PLATFORMS") != "cpu" and _sees_accelerator():
        return
    if any(n.startswith(("MALLOC_", "GLIBC_TUNABLES")) for n in os.environ):
        return
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    library.mallopt(_TRIM_THRESHOLD, -1)  # never
    library.mallopt(_TOP_PAD, _PAD)
    library.mallopt(_MMAP_MAX, 0)
    if (os.cpu_count() or 1) <= _FEW_CORES:
        # All threads share the arrays that any of them has freed.
        library.mallopt(_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Returns freed memory to the kernel, which the GNU C library keeps for reuse.

    Loading a model, compiling a program, or reading one, frees a few hundred MB.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _sees_accelerator(devices: pathlib.Path = pathlib.Path("/dev")) -> bool:
    """Whether there is a device file of a GPU or TPU. Asking jax starts its threads."""
    return any(next(devices.glob(name), None) for name in _DEVICE_FILES)
