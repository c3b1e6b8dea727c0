import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from bpd_jax.base.errors import UserError
from bpd_jax.pretrained.safetensors_files import SafetensorsFiles, open_checkpoint

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2], np.float16),
    "c": np.array([[3]], np.int64),
    "empty": np.zeros((0, 4), np.float32),
}


def file_of(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_files_of_the_library_are_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(save(TENSORS, {"format": "pt"}))
    files = open_checkpoint(tmp_path)
    assert files.names == set(TENSORS)
    for name, expected in TENSORS.items():
        tensor = files.read_integers(name) if name == "c" else files.read(name)
        np.testing.assert_array_equal(tensor, expected)
        assert tensor.dtype == expected.dtype
        assert files.shape(name) == expected.shape
    with pytest.raises(UserError, match=r"tensor c of .* is stored as I64"):
        files.read("c")
    with pytest.raises(UserError, match=r"tensor a of .* is stored as F32"):
        files.read_integers("a")
    with pytest.raises(UserError, match="no tensor d"):
        files.read("d")


def test_bfloat16_and_unaligned_tensors(tmp_path):
    values = np.array([1, -2.5, 3e38], ml_dtypes.bfloat16)
    # 5 bytes of header padding: nothing is aligned.
    header = {"x": entry("BF16", (3,), (0, 6)), "scalar": entry("F32", (), (6, 10))}
    text = json.dumps(header).encode() + b" " * 5
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(text, values.tobytes() + np.float32(7).tobytes()))
    files = SafetensorsFiles(tmp_path, [path])
    tensor = files.read("x")
    np.testing.assert_array_equal(tensor, values)
    assert tensor.dtype == ml_dtypes.bfloat16
    assert files.read("scalar") == 7
    assert files.read("scalar").shape == ()


DAMAGED = [
    b"",
    b"1234567",
    b"\xff" * 8,
    (99).to_bytes(8, "little") + b"{}",
    file_of(b"\xff\xfe"),
    file_of(b"[" * 100_000),
    file_of(b"[]"),
    file_of({"x": 3}),
    file_of({"x": {**entry(), "shape": [2.0]}}, bytes(8)),
    file_of({"x": entry(shape=(-1, -2))}, bytes(8)),
    file_of({"x": entry(shape=(True, 2))}, bytes(8)),
    file_of({"x": entry(offsets=(0, 8, 9))}, bytes(8)),
    file_of({"x": entry("F4")}, bytes(8)),
    file_of({"x": entry("F8_E4M3", (8,))}, bytes(8)),
    file_of({"x": entry()}, bytes(7)),
    file_of({"x": entry(offsets=(-8, 0))}, bytes(8)),
    file_of({"x": entry(offsets=(8, 0))}, bytes(8)),
    file_of({"x": entry(offsets=(4, 12))}, bytes(12)),
    file_of({"x": entry(shape=(3,))}, bytes(8)),
    file_of({"x": entry(shape=(2**62, 2**62, 4), offsets=(0, 0))}),
    # NumPy has no such arrays, although they are empty.
    *(
        file_of({"x": entry("F32", shape, (0, 0))})
        for shape in ([0, 10**30], [0, 2**47, 2**47], [0] + [1] * 64)
    ),
]


def read_all(path):
    files = SafetensorsFiles(path.parent, [path])
    return {name: files.read(name) for name in files.names}


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_files_are_refused_in_one_sentence(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"of /|model\.safetensors") as error:
        read_all(path)
    assert "\n" not in str(error.value)


def read_or_refuse(path, content):
    path.write_bytes(content)
    try:
        tensors = read_all(path)
    except UserError:
        return
    for tensor in tensors.values():
        assert tensor.nbytes <= len(content)


SIZES = st.integers(-2, 9) | st.integers(-(2**70), 2**70)
VALUES = st.recursive(
    st.none() | st.booleans() | SIZES | st.floats() | st.sampled_from(["F32", "BOOL"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "BOOL", "F8"]) | VALUES,
        "shape": st.lists(SIZES, max_size=3) | VALUES,
        "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | VALUES,
    }
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(st.text(max_size=3), ENTRIES | VALUES, max_size=3))
def test_random_headers_do_not_crash(tmp_path_factory, header):
    read_or_refuse(
        tmp_path_factory.getbasetemp() / "header", file_of(header, bytes(16))
    )


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x", "", "a/b", "n" * 5000, 7, None]
)
def test_index_with_paths_outside_the_folder_is_refused(tmp_path, name):
    (tmp_path / "x.safetensors").write_bytes(save(TENSORS))
    folder = tmp_path / "model"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="not a file name in its folder"):
        open_checkpoint(folder)


def test_pickles_are_not_read(tmp_path: pathlib.Path):
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="can run code and are not read"):
        open_checkpoint(tmp_path)
