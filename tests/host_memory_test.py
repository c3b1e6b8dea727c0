"""Freed arrays are reused without new pages, unless the user has set the allocator."""

import os
import platform
import subprocess
import sys

import pytest

# Prints the page faults of allocating and filling 64 MB ten times.
PROGRAM = """
import resource
import numpy as np
from bpd_jax import host_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

host_memory.keep_freed_memory()
np.ones(2**26, np.uint8)
before = faults()
for _ in range(10):
    np.ones(2**26, np.uint8)
print(faults() - before)
"""

pytestmark = pytest.mark.skipif(
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


def test_freed_arrays_are_reused():
    assert page_faults() < 50


@pytest.mark.parametrize(
    "name, value",
    [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")],
)
def test_settings_of_the_user_are_kept(name, value):
    # Pages of up to 2 MB, at least one of which is new for every array.
    assert page_faults(**{name: value}) >= 10 * 32
