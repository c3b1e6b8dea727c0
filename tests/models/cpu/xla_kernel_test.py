"""Machine code of kernels that is kept on disk."""

import jax
import pytest

pytest.importorskip("llvmlite")

from bpd_jax.models.cpu import xla_kernel


def test_machine_code_is_compiled_once(tmp_path):
    made = []

    def make():
        made.append(len(made))
        return bytes([len(made)])

    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "new"))
        assert [xla_kernel._kept(["a"], make) for _ in range(2)] == [b"\1"] * 2
        assert xla_kernel._kept(["b"], make) == b"\2"
        for file in (tmp_path / "new").iterdir():
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        assert xla_kernel._kept(["a"], make) == b"\3"
        assert xla_kernel._kept(["a"], make) == b"\3"
        jax.config.update("jax_compilation_cache_dir", None)
        assert xla_kernel._kept(["a"], make) == b"\4"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
