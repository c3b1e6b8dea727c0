"""Compiled programs are kept, unless the user says otherwise."""

import os
import pathlib
import subprocess
import sys

PROGRAM = """
import jax, jax.numpy as jnp
from bpd_jax import compiled
compiled._LEAST_SECONDS = 0.0
compiled.keep_compiled()
print(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3)))[0, 0])
"""


def run(tmp_path: pathlib.Path, **variables: str) -> list[pathlib.Path]:
    """What lies in the cache after a program that compiles something."""
    known = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment = {**known, "XDG_CACHE_HOME": str(tmp_path), **variables}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment)
    return sorted(tmp_path.rglob("*-cache"))


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    first = run(tmp_path)
    assert first
    assert all(path.parent.parent.name == "compiled" for path in first)
    assert run(tmp_path) == first


def test_the_users_own_setting_stays(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    assert not run(tmp_path / "cache", JAX_COMPILATION_CACHE_DIR="")
    run(tmp_path / "cache", JAX_COMPILATION_CACHE_DIR=str(elsewhere))
    assert not list((tmp_path / "cache").rglob("*-cache"))
