"""Tests of bpd_jax.models.stored_tensors."""

import zlib

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bpd_jax.base.errors import UserError
from bpd_jax.models.stored_tensors import (
    STORED_DTYPES,
    lowered,
    raised,
    read_tensors,
    write_tensors,
)
from bpd_jax.storage.folders import Artifact

KIND = Artifact("a thing", "thing.json", ("x.*",), remedy="make it again")
RANDOM = np.random.default_rng(0)
ARRAYS = {
    "weights": RANDOM.standard_normal((300, 70)).astype(ml_dtypes.bfloat16),
    "logarithms": -RANDOM.exponential(size=500).astype(np.float16),
    "exact": RANDOM.standard_normal(3),
    "keys": np.sort(RANDOM.integers(0, 1 << 62, 400)),
    "extremes": np.array([2**31 - 1, -(2**31), 0, -1], np.int32),
    "ids": np.arange(3, 900, 3, dtype=np.uint16),
    "steps": RANDOM.integers(-9, 9, (4, 5, 6)).astype(np.int8),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(3, np.float32),
}


@pytest.mark.parametrize("packed", [False, True])
def test_arrays_are_read_as_written(tmp_path, packed):
    path = tmp_path / "x.safetensors"
    write_tensors(path, ARRAYS, packed=packed)
    arrays, identity = read_tensors(path)
    assert len(identity) == 16
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array, strict=True)
    content = path.read_bytes()
    write_tensors(path, ARRAYS, packed=packed)
    assert path.read_bytes() == content


def test_packed_weights_are_small(tmp_path):
    weights = RANDOM.standard_normal((400, 500)).astype(np.float32)
    sizes = {}
    for dtype in STORED_DTYPES:
        write_tensors(tmp_path / dtype, lowered("w", weights, dtype, (0,)), packed=True)
        sizes[dtype] = (tmp_path / dtype).stat().st_size / weights.size
    assert sizes["float32"] < 3.6
    assert sizes["bfloat16"] < 1.4
    assert sizes["int8"] < 0.95
    assert sizes["compact"] < 0.55


@pytest.mark.parametrize(
    "dtype, error",
    [("float32", 0), ("bfloat16", 2e-3), ("int8", 0.02), ("compact", 0.08)],
)
def test_lowered_precision(dtype, error):
    """Errors relative to the root mean square of each channel."""
    values = RANDOM.standard_normal((50, 8, 30)).astype(np.float32)
    values *= 10.0 ** np.arange(-3, 5)[:, None]
    values[:, 0] = 0
    inputs = (0, -1) if dtype in ("int8", "compact") else ()
    restored = raised(lowered("kernel", values, dtype, inputs))["kernel"]
    assert restored.dtype == np.float32
    misses = np.sqrt(np.square(restored - values).mean((0, 2)))
    assert (misses <= error * np.sqrt(np.square(values).mean((0, 2)))).all()


def test_vectors_and_integers_are_not_quantised():
    ids = np.arange(5, dtype=np.int32)
    for name in ("norm", "bias_in"):
        value = np.full((2, 3) if name == "bias_in" else 3, 0.7, np.float32)
        stored = lowered(name, value, "compact", (0,))
        assert {key: array.dtype for key, array in stored.items()} == {
            name: ml_dtypes.bfloat16
        }
    assert lowered("vocabulary", ids, "compact", ())["vocabulary"] is ids
    assert raised({"vocabulary": ids})["vocabulary"] is ids


@pytest.mark.parametrize(
    "about, change, message",
    [
        ('{"a": "float32 3"}', lambda stream: stream[:-1], "shape that is stated"),
        ('{"a": "float32 3"}', lambda stream: stream * 0 + 255, "a: Error -3"),
        ("[]", None, "'a' is missing"),
        ('{"a": "float32 4"}', None, "shape that is stated"),
        ('{"a": "float32 -3"}', None, "described by 'float32 -3'"),
        # A stream that expands to 10 MB.
        (
            '{"a": "int8 10000000"}',
            lambda _: np.frombuffer(zlib.compress(bytes(10**7), wbits=-15), np.uint8),
            "too large",
        ),
    ],
)
def test_forged_packed_files_are_refused(tmp_path, about, change, message):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": np.arange(3, dtype=np.float32)}, packed=True)
    stream = load_file(path)["a"]
    save_file({"a": change(stream) if change else stream}, path, {"packed": about})
    with pytest.raises(UserError, match=message), KIND.reading(path):
        read_tensors(path)


def test_scales_of_another_shape_are_refused():
    stored = lowered("a", np.ones((2, 4), np.float32), "int8", (0,))
    with pytest.raises(ValueError, match="scales of a have shape"):
        raised(stored | {"a.scale": np.ones(3, np.float32)})
