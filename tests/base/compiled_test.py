"""Few lengths are compiled; programs are kept on disk, unless the user says not."""

import itertools
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from bpd_jax.base import compiled
from bpd_jax.base.compiled import padded_length

PROGRAM = """
import jax, jax.numpy as jnp
from bpd_jax.base import compiled
compiled._LEAST_SECONDS = 0.0
compiled.keep_compiled()
print(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3)))[0, 0])
"""


def run(tmp_path: pathlib.Path, **variables: str) -> list[pathlib.Path]:
    """The cache files after a program that compiles something has run."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    del environment["JAX_COMPILATION_CACHE_DIR"]
    environment |= variables
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


def test_without_a_home_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert compiled.cache_folder() == pathlib.Path("/home/me/.cache/bpd_jax")
    # HOME is not set, and the user has no name.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert compiled.cache_folder() is None
    (tmp_path / "file").touch()  # Not even root can make a folder in it.
    assert not run(tmp_path / "file")


def test_a_folder_that_others_can_write_is_not_used(tmp_path, capsys):
    def kept():
        compiled.write_kept("kind", [b"a"], b"1")
        return compiled.read_kept("kind", [b"a"])

    before = jax.config.jax_compilation_cache_dir
    try:
        for name, mode, is_used in (("a", 0o700, True), ("b", 0o770, False)):
            (folder := tmp_path / name).mkdir()
            folder.chmod(mode)
            jax.config.update("jax_compilation_cache_dir", str(folder))
            assert (kept() == b"1") == is_used == bool(list(folder.iterdir()))
        error = capsys.readouterr().err
        assert error.startswith(f"warning: compiled programs are not kept in {folder}")
        assert error.count("\n") == 1
        compiled.keep_compiled()
        assert jax.config.jax_compilation_cache_dir is None
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "new"))
        assert kept() == b"1"
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compiled.keep_compiled()


def test_what_is_kept_is_read_again_unless_it_is_damaged(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "new"))
        for key, content in (([b"a", b"b"], b"1"), ([b"ab"], b"2")):
            assert compiled.read_kept("kind", key) is None
            compiled.write_kept("kind", key, content)
        assert compiled.read_kept("kind", [b"a", b"b"]) == b"1"
        assert compiled.read_kept("kind", [b"ab"]) == b"2"
        assert compiled.read_kept("other", [b"ab"]) is None
        first, second = (tmp_path / "new").iterdir()
        contents = first.read_bytes(), second.read_bytes()
        first.write_bytes(contents[1])  # A kernel under the name of another one.
        second.write_bytes(contents[0])
        assert compiled.read_kept("kind", [b"a", b"b"]) is None
        assert compiled.read_kept("kind", [b"ab"]) is None
        second.write_bytes(contents[1])
        for file in (first, second):
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        assert compiled.read_kept("kind", [b"ab"]) is None
        jax.config.update("jax_compilation_cache_dir", None)
        compiled.write_kept("kind", [b"ab"], b"3")
        assert compiled.read_kept("kind", [b"ab"]) is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("per_octave, most, growth", [(8, 40, 1.13), (2, 14, 1.51)])
def test_few_lengths_are_compiled(per_octave, most, growth):
    lengths = [padded_length(n, per_octave) for n in range(1, 2049)]
    assert {32, 64, 256, 512, 1024, 2048} <= set(lengths)
    assert lengths == sorted(lengths)
    assert len(set(lengths)) < most
    for length, padded in enumerate(lengths, 1):
        assert length <= padded < max(length * growth, length + 32)
        assert padded_length(padded, per_octave) == padded
    pairs = itertools.pairwise(sorted(set(lengths)))
    assert all(b <= max(growth * a, a + 32) for a, b in pairs)
    assert padded_length(1, per_octave, shortest=64) == 64
