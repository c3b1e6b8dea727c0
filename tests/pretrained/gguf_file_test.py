import gguf
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.pretrained.gguf_file import GGUFFile

KIND = gguf.GGMLQuantizationType
# Types that the package gguf can also write, without and with blocks.
WRITABLE = ("F32", "BF16", "Q4_1")
OTHERS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def with_tensors(tiny, path, tensors, kinds):
    """A file of these tensors; its values do not matter."""
    return GGUFFile(tiny.make("llama").write(path, tensors=tensors, kinds=kinds))


@pytest.mark.parametrize("name", WRITABLE)
def test_quantised_weights_are_dequantised(tiny, tmp_path, name):
    # More rows than one block of dequantisation.
    weights = np.random.default_rng(0).normal(size=(4200, 256)).astype(np.float32)
    kind = KIND[name]
    file = with_tensors(tiny, tmp_path / "m.gguf", {"w": weights}, {"w": kind})
    weights_read = file.read("w")
    assert weights_read.dtype == np.float32
    raw = gguf.quants.quantize(weights, kind)
    np.testing.assert_array_equal(weights_read, gguf.quants.dequantize(raw, kind))
    assert np.abs(weights_read - weights).max() < 0.5


@pytest.mark.parametrize("name", OTHERS)
def test_blocks_are_dequantised_as_gguf_does(tiny, tmp_path, name):
    kind = KIND[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (2, 3, 512 // elements * size)
    raw = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    # Random scales may be infinite or NaN.
    with np.errstate(all="ignore"):
        file = with_tensors(tiny, tmp_path / "m.gguf", {"w": raw}, {"w": kind})
        weights = file.read("w")
        expected = gguf.quants.dequantize(raw, kind)
    assert weights.shape == (2, 3, 512)
    np.testing.assert_array_equal(weights, expected)


def test_a_type_that_cannot_be_dequantised_is_named(tiny, tmp_path):
    raw = np.zeros((4, 8), np.uint8)
    with pytest.raises(UserError, match="tensor 'w' is of type I8"):
        with_tensors(tiny, tmp_path / "m.gguf", {"w": raw}, {"w": KIND.I8})


def test_metadata_values_keep_their_types(tiny, tmp_path):
    values = {
        "a.number": 3,
        "a.fraction": 1e-5,
        "a.flag": False,
        "a.text": "ä",
        "a.numbers": [1, 2],
        "a.flags": [True, False],
        "a.texts": ["x", ""],
    }
    file = GGUFFile(tiny.make("llama").write(tmp_path / "m.gguf", values))
    assert file.get("a.number", int) == 3
    assert file.get("a.number", float) == 3.0
    assert file.get("a.fraction", float) == 1e-5
    assert file.get("a.flag", bool) is False
    assert file.get("a.text", str) == "ä"
    assert file.get("a.numbers", np.ndarray).tolist() == [1, 2]
    assert file.get("a.flags", np.ndarray).tolist() == [True, False]
    assert file.get("a.texts", list) == ["x", ""]
    assert file.find("a.missing", int) is None
    with pytest.raises(UserError, match=r"lacks a\.missing"):
        file.get("a.missing", int)
    for key, kind in (("a.flag", int), ("a.text", float), ("a.number", bool)):
        with pytest.raises(UserError, match=f"{key} must be "):
            file.find(key, kind)


def test_missing_files_and_other_formats_are_named(tmp_path):
    empty_file, other_format = tmp_path / "empty.gguf", tmp_path / "other.gguf"
    empty_file.touch()
    other_format.write_bytes(b"GGML and something")
    for path, message in (
        (tmp_path / "none.gguf", "cannot read .*No such file"),
        (tmp_path, "cannot read .*Is a directory"),
        (empty_file, "is not a GGUF file"),
        (other_format, "is not a GGUF file"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            GGUFFile(path)
        assert str(path) in str(caught.value)


def test_versions_and_byte_orders(tiny, tmp_path):
    path = tiny.make("llama").write(tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data[:4] + (2).to_bytes(4, "little") + data[8:])
    assert "token_embd.weight" in GGUFFile(path).tensors
    # Version 3 of a big-endian machine is 3 << 24.
    for version in (1, 4, 3 << 24):
        path.write_bytes(data[:4] + version.to_bytes(4, "little") + data[8:])
        with pytest.raises(UserError, match="version 2 or 3 for little-endian"):
            GGUFFile(path)
