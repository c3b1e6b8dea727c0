"""Programs are kept on disk, and run in another process without tracing."""

import json
import os
import subprocess
import sys

import jax
import pytest

from bpd_jax.base import compiled
from bpd_jax.models import programs

PROCESS = """
import functools, json, sys
import jax, jax.numpy as jnp, numpy as np
from bpd_jax.base import compiled
from bpd_jax.base.compiled import forget_compiled, keep_compiled
from bpd_jax.cpu.tile import tile_of_processor
from bpd_jax.cpu.tiled_matrix import tiled, times_tiled
from bpd_jax.models.model import Model
from bpd_jax.models.programs import Program

traced, has_kernel = [], tile_of_processor() is not None

def step(matrix, scale, state, count):
    traced.append(state.shape)
    product = times_tiled if has_kernel else lambda x, m: x @ m.T
    return product(state, matrix.params) * scale + count

program = Program(
    step, static=("scale",), constants=("matrix",), donate=("state",)
)
compiled.LEAST_SECONDS_WHOLE = 0.0
keep_compiled()
numbers = np.arange(256.0, dtype=np.float32).reshape(16, 16)
matrix = Model(None, tiled(numbers) if has_kernel else jnp.asarray(numbers))
results = []
for rows, scale in ((2, 1.0), (2, 3.0), (2, 1.0), (5, 1.0)):
    state = jnp.ones((rows, 16)) * rows
    results.append(program(matrix, scale, state, np.int32(7)).tolist())
    assert state.is_deleted()

class Scale(float):  # Not of bpd_jax, hence in no file of the key.
    pass

program(matrix, Scale(1.0), jnp.ones((3, 16)), np.int32(7))
with jax.default_matmul_precision("highest"):
    program(matrix, 1.0, jnp.ones((7, 16)), np.int32(7))
program(matrix, 1.0, jnp.ones((7, 16)), np.int32(7))
forget_compiled()
again = program(matrix, 1.0, jnp.ones((2, 16)) * 2, np.int32(7)).tolist()
assert again == results[0] == results[2]
print(json.dumps([results, traced]))
"""

MATRIX = [[float(16 * row + column) for column in range(16)] for row in range(16)]


# The last two differ in the precision of products.
TRACED = [[2, 16], [2, 16], [5, 16], [3, 16], [7, 16], [7, 16]]


def run(tmp_path, **variables):
    """Results and the shapes that were traced, in a process of its own."""
    inherited = {
        k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"
    }
    environment = {**inherited, "XDG_CACHE_HOME": str(tmp_path), **variables}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        check=True,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    return folder, *run(folder)


def test_each_program_is_traced_once(first):
    _, results, traced = first
    assert traced == TRACED
    for (rows, scale), result in zip(
        ((2, 1), (2, 3), (2, 1), (5, 1)), results, strict=True
    ):
        sums = [rows * sum(row) * scale + 7 for row in MATRIX]
        assert result == [sums] * rows


def test_another_process_traces_only_what_is_not_of_this_package(first):
    folder, results, _ = first
    assert run(folder) == [results, [[3, 16]]]


def test_settings_of_compilers_make_other_programs(first):
    folder, results, traced = first
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=false"
    assert run(folder, XLA_FLAGS=flags) == [results, traced]


def test_damaged_programs_are_compiled_again(first):
    folder, results, traced = first
    for path in folder.rglob("program-*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    assert run(folder) == [results, traced]
    assert run(folder) == [results, [[3, 16]]]


def test_files_newer_than_the_process_are_not_trusted(monkeypatch):
    assert programs._sources() is not None
    monkeypatch.setattr(programs, "_STARTED", 0.0)
    assert programs._sources() is None


def test_threads_that_compile_uncached_restore_the_cache_once():
    with compiled.uncached():
        with compiled.uncached():
            pass
        assert not jax.config.jax_enable_compilation_cache
    assert jax.config.jax_enable_compilation_cache
