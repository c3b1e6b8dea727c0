"""Blocks of GGUF files as quantized matrices: the values of the package gguf."""

import gguf
import numpy as np
import pytest

from bpd_jax.pretrained.gguf_blocks import quantized_matrix

KIND = gguf.GGMLQuantizationType
# The byte positions of scales in float16, which must be finite.
SCALES = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


def random_blocks(name, rows=3, length=512):
    elements, size = gguf.GGML_QUANT_SIZES[KIND[name]]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (rows * length // elements, size), np.uint8)
    for place in SCALES[name]:
        numbers = rng.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = numbers.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", SCALES)
def test_values_equal_those_of_the_package(name):
    raw = random_blocks(name)
    matrix = quantized_matrix(raw, KIND[name])
    expected = gguf.quants.dequantize(raw, KIND[name])
    np.testing.assert_array_equal(matrix.values(), expected)
    assert matrix.bits == (4 if name.startswith("Q4") else 8)
    assert matrix.block == (16 if name == "Q6_K" else 32)
    assert not np.shares_memory(matrix.integers, raw)


def test_other_types_do_not_fit():
    assert quantized_matrix(np.zeros((2, 84), np.uint8), KIND.Q2_K) is None
    assert quantized_matrix(np.zeros((2, 64), np.uint8), KIND.F16) is None
