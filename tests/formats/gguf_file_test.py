import gguf
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.formats.gguf_blocks import quantized_matrix
from bpd_jax.formats.gguf_file import GGUFFile

KIND = gguf.GGMLQuantizationType
# Types by the bits and the size of blocks of their quantized matrices.
STORAGES = {
    (4, 32): ("Q4_0", "Q4_1", "Q4_K"),
    (8, 32): ("Q8_0", "Q5_0", "Q5_1", "Q5_K"),
    (8, 16): ("Q6_K",),
    None: ("F32", "F16", "BF16", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"),
}


def with_tensors(tiny, path, tensors, kinds):
    return GGUFFile(tiny.make("llama").write(path, tensors=tensors, kinds=kinds))


@pytest.mark.parametrize(
    "storage, name", [(key, name) for key, names in STORAGES.items() for name in names]
)
def test_blocks_are_dequantised_as_gguf_does(tiny, tmp_path, storage, name):
    kind = KIND[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    # More rows than one block of dequantisation.
    shape = (2, 1100, 512 // elements * size)
    raw = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    blocks = raw.reshape(-1, size)
    # Random scales may be infinite or NaN.
    with np.errstate(all="ignore"):
        finite = np.isfinite(gguf.quants.dequantize(blocks, kind)).all(1)
    blocks[~finite] = 0
    file = with_tensors(tiny, tmp_path / "m.gguf", {"w": raw}, {"w": kind})
    weights = file.read("w")
    expected = gguf.quants.dequantize(raw, kind)
    assert (weights.shape, weights.dtype) == ((2, 1100, 512), np.float32)
    np.testing.assert_array_equal(weights, expected)
    matrix = quantized_matrix(raw[0], kind)
    if storage is None:
        assert matrix is None
        return
    assert (matrix.bits, matrix.block) == storage
    np.testing.assert_array_equal(matrix.values(), expected[0])
    assert not np.shares_memory(matrix.integers, raw)


@pytest.mark.parametrize("read", ["read", "quantized"])
def test_an_infinite_scale_is_named(tiny, tmp_path, read):
    raw = np.zeros((4, 34), np.uint8)
    raw[2, :2] = np.float16([np.inf]).view(np.uint8)
    file = with_tensors(tiny, tmp_path / "m.gguf", {"w": raw}, {"w": KIND.Q8_0})
    with np.errstate(all="ignore"), pytest.raises(UserError, match="damaged: tensor w"):
        getattr(file, read)("w")


def test_a_type_that_cannot_be_dequantised_is_named(tiny, tmp_path):
    raw = np.zeros((4, 8), np.uint8)
    with pytest.raises(UserError, match="tensor 'w' is of type I8"):
        with_tensors(tiny, tmp_path / "m.gguf", {"w": raw}, {"w": KIND.I8})


def test_metadata_values_keep_their_types(tiny, tmp_path):
    values = {"a.number": 3, "a.fraction": 1e-5, "a.flag": False, "a.text": "ä"}
    arrays = {"a.numbers": [1, 2], "a.flags": [True, False]}
    values |= {"a.texts": ["x", ""], **arrays}
    file = GGUFFile(tiny.make("llama").write(tmp_path / "m.gguf", values))
    assert file.get("a.number", float) == 3.0
    for key in ("a.number", "a.fraction", "a.flag", "a.text", "a.texts"):
        assert file.get(key, type(values[key])) == values[key]
    for key, array in arrays.items():
        assert file.get(key, np.ndarray).tolist() == array
    assert file.find("a.missing", int) is None
    with pytest.raises(UserError, match=r"lacks a\.missing"):
        file.get("a.missing", int)
    for key, kind in (("a.flag", int), ("a.text", float), ("a.number", bool)):
        with pytest.raises(UserError, match=f"{key} must be "):
            file.find(key, kind)


def test_missing_files_and_other_formats_are_named(tmp_path):
    (tmp_path / "empty.gguf").touch()
    for path, message in (
        (tmp_path / "none.gguf", "cannot read .*No such file"),
        (tmp_path, "cannot read .*Is a directory"),
        (tmp_path / "empty.gguf", "is not a GGUF file"),
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
