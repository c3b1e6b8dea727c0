"""Quantized matrices: values, rows, sharding, saving."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from bpd_jax.models import quantized
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.products import times_rows
from bpd_jax.models.quantized import (
    QuantizedMatrix,
    in_kernel,
    pack,
    quantize,
    rounded,
)
from bpd_jax.models.quantized_kernel import gpu_product


def random(bits, rows=6, length=128, seed=0):
    rng = np.random.default_rng(seed)
    shape = rows, length // 32
    scales = rng.uniform(0.1, 1, shape).astype(np.float32)
    if bits == 8:
        integers = rng.integers(-128, 128, (rows, length), np.int8)
        return QuantizedMatrix(integers, scales), integers
    integers = rng.integers(0, 16, (rows, length), np.uint8)
    minima = rng.normal(size=shape).astype(np.float32)
    return QuantizedMatrix(pack(integers), scales, minima), integers


@pytest.mark.parametrize("bits", [4, 8])
def test_values_are_scaled_integers(bits):
    matrix, integers = random(bits)
    expected = integers.astype(np.float32) * np.repeat(matrix.scales, 32, 1)
    if bits == 4:
        expected += np.repeat(matrix.minima, 32, 1)
    assert matrix.shape == expected.shape
    assert (matrix.bits, matrix.block) == (bits, 32)
    np.testing.assert_allclose(matrix.values(), expected, rtol=1e-6)
    ids = np.array([[1, 5], [0, 1]])
    np.testing.assert_array_equal(matrix[ids], matrix.values()[ids])
    chosen = matrix.rows(ids[0])
    np.testing.assert_array_equal(chosen.values(), matrix.values()[ids[0]])
    assert matrix.values("bfloat16").dtype == jnp.bfloat16


@pytest.mark.parametrize("bits", [4, 8])
def test_arrays_are_sharded_in_whole_blocks(bits):
    mesh = make_mesh(MeshConfig(fsdp=2, model=2), jax.devices()[:4])

    def place(matrix, summed, *spec):
        return matrix.placed(NamedSharding(mesh, jax.P(*spec)), summed)

    matrix, _ = random(bits)
    # An embedding `[O, I]`, a kernel `[I, heads, features]`, an output of attention.
    for sharded in (
        place(matrix, 0, "model", "fsdp"),
        place(matrix, 1, "fsdp", "model", None),
        place(matrix, 2, "fsdp", None, "model"),
    ):
        shapes = {x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(sharded)}
        assert shapes == {(3, 128 * bits // 16), (3, 2)}
        values = jax.jit(QuantizedMatrix.values)(sharded)
        np.testing.assert_array_equal(values, matrix.values())
    odd, _ = random(8, rows=5, length=96)
    specs = {x.sharding.spec for x in jax.tree.leaves(place(odd, 0, "model", "fsdp"))}
    assert specs == {jax.P(None, None)}


def test_sums_of_integers_are_scaled_where_an_output_has_one_scale():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 64)).astype(np.float32)
    kernel = rng.normal(size=(64, 4, 6)).astype(np.float32)
    params = {"mlp": {"input": {"kernel": jnp.asarray(kernel)}}}
    trunk, error = rounded(params, by_output=True)
    rows = trunk["mlp"]["input"]["kernel"].rows
    assert rows.by_output
    assert 0 < error < 0.01
    got = times_rows(x, rows, "float32")
    np.testing.assert_allclose(got, x @ rows.values().T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, x @ kernel.reshape(64, 24), rtol=0.1, atol=0.3)
    # The axis of I is split, the scales are not.
    mesh = make_mesh(MeshConfig(fsdp=2, model=2), jax.devices()[:4])
    placed = rows.placed(NamedSharding(mesh, jax.P("fsdp", "model", None)), 1)
    shapes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(placed)]
    assert shapes == [(12, 32), (12, 1)]
    again = jax.jit(times_rows, static_argnums=2)(x, placed, "float32")
    np.testing.assert_allclose(again, got, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits, rows", [(8, 1), (8, 9), (4, 3)])
def test_a_gpu_expands_blocks_where_it_multiplies(monkeypatch, bits, rows):
    interpreted = functools.partial(gpu_product, interpret=True)
    monkeypatch.setattr(quantized, "gpu_product", interpreted)
    matrix, _ = random(bits, rows=40, length=224)
    marked = in_kernel({"softmax": matrix})["softmax"]
    x = np.random.default_rng(2).normal(size=(2, rows, 224)).astype(np.float32)
    got = times_rows(x, marked, "float32")
    want = times_rows(x, matrix, "float32")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    half = times_rows(x, marked, "bfloat16")
    np.testing.assert_allclose(half, want, rtol=0.05, atol=9)


def test_quantizing_rounds_to_127_steps_of_the_largest():
    values = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    values[2, 32:] = 0
    matrix = quantize(values)
    largest = np.abs(values.reshape(5, 2, 32)).max(-1, keepdims=True)
    error = np.abs(matrix.values() - values).reshape(5, 2, 32)
    assert (error <= largest / 253).all()
    again = quantize(np.asarray(matrix.values()))
    np.testing.assert_array_equal(again.integers, matrix.integers)
