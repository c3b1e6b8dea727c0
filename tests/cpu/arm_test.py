"""Kernels for ARM: their machine code, run by an emulator where there is one.

Needs a compiler for aarch64 and QEMU's emulator of its programs (on Debian the packages
gcc-aarch64-linux-gnu and qemu-user-static).
"""

import shutil
import struct
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.cpu import (
    attention_kernel,
    integer_kernel,
    ordered_functions,
    tile,
)
from bpd_jax.cpu.tile import ARM, Tile
from bpd_jax.cpu.tiled_matrix import tiled, times_tiled
from bpd_jax.models.cache import BITS
from bpd_jax.models.layers import ACTIVATIONS
from tests.cpu.integer_kernel_test import STORAGES, quantized, rounded

pytest.importorskip("llvmlite")
from llvmlite import binding

from bpd_jax.cpu import xla_kernel

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
TILE = Tile(width=4, outputs=4, rows=4)

# Calls a kernel as XLA does, with one thread: see `bpd_jax.cpu.xla_kernel`.
CALLER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct buffer { char head[24]; void *data; int64_t rank, *sizes; };

extern void *handler(char *frame);

static void *one_thread(void *arguments) { return NULL; }

static struct buffer *read_buffer(FILE *file, int64_t *bytes) {
  struct buffer *buffer = calloc(1, sizeof *buffer);
  fread(&buffer->rank, 8, 1, file);
  buffer->sizes = calloc(8, 8);
  fread(buffer->sizes, 8, buffer->rank, file);
  fread(bytes, 8, 1, file);
  buffer->data = aligned_alloc(64, (*bytes + 127) / 64 * 64);
  return buffer;
}

int main(int count, char **names) {
  char frame[160] = {0}, interface[160] = {0};
  void *buffers[2][16];
  int64_t bytes[2][16], counts[2];
  FILE *file = fopen(names[1], "rb");
  fread(counts, 8, 2, file);
  for (int part = 0; part < 2; part++)
    for (int i = 0; i < counts[part]; i++) {
      struct buffer *buffer = read_buffer(file, &bytes[part][i]);
      if (part == 0) fread(buffer->data, 1, bytes[part][i], file);
      buffers[part][i] = buffer;
    }
  *(void **)(interface + 144) = one_thread;
  *(void **)(frame + 16) = interface;
  *(void **)(frame + 72) = buffers[0];
  *(void **)(frame + 112) = buffers[1];
  handler(frame);
  for (int i = 0; i < counts[1]; i++)
    fwrite(((struct buffer *)buffers[1][i])->data, 1, bytes[1][i], stdout);
  return 0;
}
"""


@pytest.mark.parametrize("words, width", [("fp asimd asimddp", ARM), ("fp", None)])
def test_instructions_are_those_of_the_processor(monkeypatch, tmp_path, words, width):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nFeatures : {words}\n")
    monkeypatch.setattr(tile, "is_arm", lambda: True)
    monkeypatch.setattr("sys.platform", "linux")
    features = tile.read_features.__wrapped__("", str(tmp_path / "cpuinfo"))
    assert ("+dotprod" in features.flatten()) == (width is not None)
    monkeypatch.setattr(integer_kernel, "processor_features", lambda: features)
    assert (integer_kernel.lanes() == ARM) == (width is not None)


def machine_code(module):
    """An object file, and its assembly, for a processor with products of integers."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple("aarch64-linux-gnu").create_target_machine(
        features="+neon,+dotprod", opt=3, reloc="pic"
    )
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    return machine.emit_object(parsed), machine.emit_assembly(parsed)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that calls a kernel with arrays and returns its results."""
    if not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
        pytest.skip("no emulator of ARM")
    folder = tmp_path_factory.mktemp("arm")
    (folder / "caller.c").write_text(CALLER)

    def call(module, arguments, results):
        code, _ = machine_code(module)
        (folder / "kernel.o").write_bytes(code)
        files = [str(folder / name) for name in ("caller.c", "kernel.o")]
        program = str(folder / "program")
        command = [COMPILER, "-O1", "-w", "-static", *files, "-lm", "-o", program]
        subprocess.run(command, check=True)
        parts = [struct.pack("<2q", len(arguments), len(results))]
        for array in (*arguments, *results):
            shape = struct.pack(f"<{1 + array.ndim}q", array.ndim, *array.shape)
            parts += [shape, struct.pack("<q", array.nbytes)]
        # The contents of an argument follow its sizes.
        for number, array in reversed(list(enumerate(arguments))):
            parts.insert(1 + 2 * (number + 1), array.tobytes())
        (folder / "input").write_bytes(b"".join(parts))
        output = subprocess.run(
            [EMULATOR, program, str(folder / "input")], check=True, capture_output=True
        ).stdout
        arrays, at = [], 0
        for array in results:
            part = np.frombuffer(output, array.dtype, array.size, at)
            arrays.append(part.reshape(array.shape))
            at += array.nbytes
        return arrays

    return call


def test_integers_are_multiplied_four_at_a_time():
    from bpd_jax.cpu.integer_kernel_code import integer_module

    module = integer_module(ARM, 8, 32, offset=0, minima=0)
    assert "sdot" in machine_code(module)[1]


@pytest.fixture
def on_arm(run, monkeypatch):
    """Calls of kernels are emulated."""
    modules = {}
    monkeypatch.setattr(xla_kernel, "register", modules.setdefault)

    def ffi_call(name, results):
        def call(*arguments):
            several = isinstance(results, tuple)
            empty = [np.zeros(x.shape, x.dtype) for x in jax.tree.leaves(results)]
            arrays = run(modules[name](), [np.asarray(a) for a in arguments], empty)
            return tuple(arrays) if several else arrays[0]

        return call

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    for module in (attention_kernel, ordered_functions):
        monkeypatch.setattr(module, "tile_of_processor", lambda: TILE)


def normal(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.usefixtures("on_arm")
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_products_of_integers(storage):
    block = storage[1]
    for rows, length, outputs in ((1, 32, 1), (6, 96, 37), (19, 576, 203)):
        x = normal(rows, length)
        x[0, :32] = 0
        matrix = quantized(*storage, length, outputs)
        tiles = tiled(matrix, ARM, rounds_operands=True)
        product = times_tiled(x, tiles)
        exact = rounded(x, block) @ np.asarray(matrix.values(), np.float64).T
        assert np.abs(product - exact).max() <= 1e-6 * np.abs(exact).max()
        np.testing.assert_array_equal(times_tiled(x[-1:], tiles), product[-1:])
        ends = [0, outputs - 1]
        np.testing.assert_array_equal(tiles[np.array(ends)], matrix.values()[ends])


@pytest.mark.usefixtures("on_arm")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *STORAGES], ids=str)
def test_products_of_floating_point_numbers(dtype):
    for rows, outputs in ((1, 3), (7, 41), (11, 5)):
        x = normal(rows, 64)
        if isinstance(dtype, str):
            values = matrix = np.asarray(jnp.asarray(normal(outputs, 64), dtype))
        else:
            matrix = quantized(*dtype, 64, outputs)
            values = matrix.values()
        wanted = x @ np.asarray(values, np.float32).T
        got = times_tiled(x, tiled(matrix, ARM))
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_arm")
def test_norms_and_activations():
    x, scale = normal(3, 40), normal(40)
    norm = ordered_functions.row_norm(x, scale, None, 1e-5, centred=False)
    wanted = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(norm, wanted, rtol=1e-5, atol=1e-5)
    for name in ACTIVATIONS:
        got = ordered_functions.row_activation(name, x, normal(3, 40))
        wanted = ACTIVATIONS[name](jnp.asarray(x)) * normal(3, 40)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("on_arm")
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_attention(dtype):
    """Of the last of three tokens, as it is after the others in the cache."""
    heads, width, slots = 2, 16, 24
    keys, values = (
        normal(1, 12, heads, width),
        normal(12, 1, heads, width).swapaxes(0, 1),
    )
    queries = normal(1, 12, 2 * heads, width)

    def cached(count):
        shape = (1, heads, width, slots)
        stored = np.zeros(shape, np.float32), np.zeros(shape, np.float32).swapaxes(2, 3)
        stored[0][..., :count] = keys[:, :count].transpose(0, 2, 3, 1)
        stored[1][:, :, :count] = values[:, :count].swapaxes(1, 2)
        if dtype == "uint16":
            stored = [
                np.asarray(jnp.asarray(x, jnp.bfloat16)).view(BITS) for x in stored
            ]
        return *stored, np.array([count], np.int32)

    def attend(count):
        new = slice(count, None)
        mask = np.tril(np.ones((1, 12 - count, 12 - count), bool))
        return attention_kernel.ordered_attention(
            queries[:, new], keys[:, new], values[:, new], mask, *cached(count)
        )

    alone, drafted = attend(11), attend(9)
    np.testing.assert_array_equal(alone[:, -1], drafted[:, -1])
    scores = np.einsum("nh,unh->nu", queries[0, -1], keys[0].repeat(2, 1)) * width**-0.5
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    wanted = np.einsum("nu,unh->nh", weights, values[0].repeat(2, 1))
    rtol = 1e-4 if dtype == "float32" else 0.05
    np.testing.assert_allclose(alone[0, -1], wanted, rtol=rtol, atol=rtol)
