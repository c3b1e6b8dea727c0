import math

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.formats.gguf_file import GGUFFile
from bpd_jax.formats.gguf_options import read_rotary
from bpd_jax.models.rotary import RotaryConfig


def converted(width, base, factor, low, high, length):
    """The factors that llama.cpp's converter writes for Llama 3's scaling."""
    factors = []
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * base ** (i / width)
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.fixture
def read(tiny, tmp_path):
    def read_values(values, factors=None, width=8):
        tensors = {} if factors is None else {"rope_freqs.weight": factors}
        path = tiny.make("llama").write(tmp_path / "m.gguf", values, tensors)
        return read_rotary(GGUFFile(path), "llama", width)

    return read_values


@pytest.mark.parametrize(
    "width, base, values",
    [
        (64, 5e5, (32.0, 1.0, 4.0, 8192)),
        (128, 5e5, (16.0, 2.0, 6.0, 4096)),
        # No interpolated frequency.
        (8, 1e4, (8.0, 1.0, 4.0, 256)),
    ],
)
def test_scaling_of_llama_3_is_recovered(read, width, base, values):
    factor, low, high, length = values
    factors = converted(width, base, *values)
    rotary = read({"llama.rope.freq_base": base}, factors, width)
    assert rotary.scaling == "llama3"
    assert rotary.factor == factor
    plain = RotaryConfig(base).frequencies(width)
    np.testing.assert_allclose(rotary.frequencies(width), plain / factors, 1e-6)
    if width > 16:
        ratio = rotary.original_length / length
        assert rotary.low_factor == pytest.approx(ratio * low, rel=1e-4)
        assert rotary.high_factor == pytest.approx(ratio * high, rel=1e-4)


def test_equal_factors_are_linear_or_none(read):
    assert read({}, np.full(4, 2.0, np.float32)) == RotaryConfig(
        5000.0, scaling="linear", factor=2.0
    )
    assert read({}, np.ones(4, np.float32)) == RotaryConfig(5000.0)


def scaling(kind, **values):
    prefix = "llama.rope.scaling"
    values = {"type": kind, "factor": 4.0, **values}
    return {f"{prefix}.{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    "values, factors, message",
    [
        ({}, [1, 3, 2, 8], "not those of Llama 3"),
        ({}, [1, 1, math.nan, 8], "numbers that are not finite"),
        # llama.cpp applies both.
        (scaling("linear"), [1] * 4, "together with the scaling"),
        (scaling("yarn"), [1] * 4, "together with the scaling"),
        (scaling("yarn", yarn_log_multiplier=0.1), None, "is not supported"),
        ({"llama.rope.dimension_count": 3}, None, "dimension_count cannot be 3"),
    ],
)
def test_other_scalings_are_refused(read, values, factors, message):
    with pytest.raises(UserError, match=message):
        read(values, None if factors is None else np.array(factors, np.float32))


def test_linear_scaling_has_an_old_and_a_new_key(read):
    expected = RotaryConfig(5000.0, scaling="linear", factor=4.0)
    assert read(scaling("linear")) == expected
    assert read({"llama.rope.scale_linear": 4.0}) == expected
    assert read(scaling("none")) == RotaryConfig(5000.0)


def test_yarn_is_read_with_its_amplitude(read):
    rotary = read(scaling("yarn", original_context_length=32))
    assert rotary == RotaryConfig(
        5000.0, scaling="yarn", factor=4.0, original_length=32
    )
    assert rotary.amplitude == pytest.approx(0.1 * math.log(4) + 1)
    rotary = read(scaling("yarn", yarn_attn_factor=0.5))
    assert rotary.original_length == 64
    assert rotary.amplitude == pytest.approx(0.5 * (0.1 * math.log(4) + 1))


def test_partial_rotary_dimensions(read):
    assert read({"llama.rope.dimension_count": 4}).num_rotated(8) == 4
