"""Marks of tests that need a compiler, which is in an environment of its own."""

import pytest

from bpd_jax.compilation.compiler import has_compiler

NEEDS_LIBTPU = pytest.mark.skipif(
    not has_compiler("v4:2x2x1"), reason="libtpu, the TPU compiler, is not installed"
)
NEEDS_CUDA = pytest.mark.skipif(
    not has_compiler("h100:1"), reason="jax's package for CUDA is not installed"
)
