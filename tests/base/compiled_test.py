"""Compiled programs are cached on disk, unless the user sets otherwise."""

import os
import pathlib
import subprocess
import sys

PROGRAM = """
import jax, jax.numpy as jnp
from bpd_jax.base import compiled
compiled._LEAST_SECONDS = 0.0
compiled.keep_compiled()
print(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3)))[0, 0])
"""


def run(tmp_path: pathlib.Path, **variables: str) -> list[pathlib.Path]:
    """The cache files after a program that compiles something has run."""
    inherited = {
        k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"
    }
    environment = {**inherited, "XDG_CACHE_HOME": str(tmp_path), **variables}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment)
    return sorted(tmp_path.rglob("*-cache"))


def test_second_process_reuses_compiled_programs(tmp_path):
    cache_files = run(tmp_path)
    assert cache_files
    assert all(path.parent.parent.name == "compiled" for path in cache_files)
    assert run(tmp_path) == cache_files


def test_cache_folder_set_by_the_user_is_kept(tmp_path):
    assert not run(tmp_path, JAX_COMPILATION_CACHE_DIR="")
    assert not list(tmp_path.iterdir())
