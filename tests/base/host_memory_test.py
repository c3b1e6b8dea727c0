"""The host's memory."""

import ctypes
import os
import platform
import subprocess
import sys
import types

import pytest

from bpd_jax.base import host_memory

# Prints the page faults of allocating and filling 64 MB ten times.
PROGRAM = """
import resource
import numpy as np
from bpd_jax.base import host_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

host_memory.keep_freed_memory()
np.ones(2**26, np.uint8)
before = faults()
for _ in range(10):
    np.ones(2**26, np.uint8)
print(faults() - before)
"""

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="for the GNU C library"
)


def page_faults(**variables: str) -> int:
    """The page faults of the program."""
    allocator = ("MALLOC_", "GLIBC_TUNABLES")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(allocator)}
    inherited["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=True,
        env={**inherited, **variables},
        stdout=subprocess.PIPE,
    )
    return int(done.stdout)


@glibc
def test_freed_arrays_are_reused():
    assert page_faults() < 50


@glibc
def test_settings_of_the_user_are_kept():
    # The pages of every array are new; they have up to 2 MB.
    assert page_faults(GLIBC_TUNABLES="glibc.malloc.arena_max=2") >= 10 * 32


@pytest.mark.parametrize(
    "accelerator, platforms, cores, kept",
    [
        (False, None, 2, {-1: -1, -2: 256 * 2**20, -4: 0, -8: 1}),
        (False, None, 64, {-1: -1, -2: 256 * 2**20, -4: 0}),
        (True, None, 2, {}),
        (True, "cpu", 2, {-1: -1, -2: 256 * 2**20, -4: 0, -8: 1}),
    ],
)
def test_accelerators_are_left_alone(monkeypatch, accelerator, platforms, cores, kept):
    """Trimming, padding of the heap, mapped arrays and arenas, as in <malloc.h>."""
    settings = {}
    library = types.SimpleNamespace(
        gnu_get_libc_version=None, mallopt=settings.__setitem__
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(host_memory, "_sees_accelerator", lambda: accelerator)
    for name in [n for n in os.environ if n.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    host_memory.keep_freed_memory()
    assert settings == kept


@pytest.mark.parametrize(
    "name, seen",
    [("nvidia0", True), ("nvidiactl", False), ("vfio/12", True), ("vfio/vfio", False)],
)
def test_device_files_of_accelerators_are_known(tmp_path, name, seen):
    assert not host_memory._sees_accelerator(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert host_memory._sees_accelerator(tmp_path) == seen
