"""The host's memory and clock."""

import ctypes
import os
import platform
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.cpu import host

# Prints the page faults of allocating and filling 64 MB ten times.
PROGRAM = """
import resource
import numpy as np
from bpd_jax.cpu import host

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

host.keep_freed_memory()
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
    monkeypatch.setattr(host, "_sees_accelerator", lambda: accelerator)
    for name in [n for n in os.environ if n.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    host.keep_freed_memory()
    assert settings == kept


@pytest.mark.parametrize(
    "name, seen",
    [("nvidia0", True), ("nvidiactl", False), ("vfio/12", True), ("vfio/vfio", False)],
)
def test_device_files_of_accelerators_are_known(tmp_path, name, seen):
    assert not host._sees_accelerator(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert host._sees_accelerator(tmp_path) == seen


@pytest.mark.usefixtures("instructions")
@pytest.mark.instructions("avx2")
def test_the_clock_is_read_in_every_iteration_of_a_loop():
    @jax.jit
    def run(matrix):
        def step(matrix, _):
            matrix = jnp.tanh(matrix @ matrix)
            return matrix, host.microseconds(matrix)

        return jax.lax.scan(step, matrix, length=20)[1]

    matrix = jnp.full((300, 300), 1e-3)
    jax.block_until_ready(run(matrix))
    before = time.monotonic()
    times = np.asarray(jax.block_until_ready(run(matrix))).astype(np.int64)
    after = time.monotonic()
    taken = np.diff(times) % 2**32
    assert (taken > 0).all()
    assert taken.sum() < 1e6 * (after - before)
    assert abs(times[0] - 1e6 * before % 2**32) < 1e6 * (after - before) + 1


@pytest.mark.usefixtures("instructions")
@pytest.mark.instructions("no kernels")
def test_other_processors_have_none():
    assert host.microseconds(jnp.zeros(1)) is None
