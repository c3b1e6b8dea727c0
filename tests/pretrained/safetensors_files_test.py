import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from bpd_jax.errors import UserError
from bpd_jax.pretrained.safetensors_files import SafetensorsFolder, map_file

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


def test_what_the_library_writes_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(TENSORS, {"format": "pt"}))
    found = map_file(path)
    assert set(found) == set(TENSORS)
    for name, want in TENSORS.items():
        np.testing.assert_array_equal(found[name], want)
        assert found[name].dtype == want.dtype
        assert not found[name].flags.writeable


def test_bfloat16_and_odd_places(tmp_path):
    values = np.array([1, -2.5, 3e38], ml_dtypes.bfloat16)
    # 5 bytes of header padding, then one byte before the tensor: nothing is aligned.
    header = {"x": entry("BF16", (3,), (1, 7)), "scalar": entry("F32", (), (7, 11))}
    text = json.dumps(header).encode() + b" " * 5
    data = b"\0" + values.tobytes() + np.float32(7).tobytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(text, data))
    found = map_file(path)
    np.testing.assert_array_equal(found["x"], values)
    assert found["x"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(np.array(found["x"], np.float32), np.float32(values))
    assert found["scalar"].shape == ()
    assert found["scalar"] == 7


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "ends before its header"),
        (b"1234567", "ends before its header"),
        (b"\xff" * 8, "its header would have 18,446,744,073,709,551,615 bytes"),
        ((99).to_bytes(8, "little") + b"{}", "ends within its header"),
        (file_of(b"\xff\xfe"), "header of .* is not valid JSON"),
        (file_of(b"[" * 100_000), "header of .* is not valid JSON"),
        (file_of(b"[]"), "header of .* is not a JSON object"),
        (file_of({"x": 3}), "does not describe 'x'"),
        (file_of({"x": {**entry(), "shape": [2.0]}}, bytes(8)), "does not describe"),
        (file_of({"x": entry(shape=(-1, -2))}, bytes(8)), "does not describe 'x'"),
        (file_of({"x": entry(shape=(True, 2))}, bytes(8)), "does not describe 'x'"),
        (file_of({"x": entry(offsets=(0, 8, 9))}, bytes(8)), "does not describe 'x'"),
        (file_of({"x": entry("F4")}, bytes(8)), "tensor x of .* is stored as F4"),
        (file_of({"x": entry()}, bytes(7)), "'x' would lie at bytes 0 to 8 of 7"),
        (file_of({"x": entry(offsets=(-8, 0))}, bytes(8)), "'x' would lie at bytes -8"),
        (file_of({"x": entry(offsets=(8, 0))}, bytes(8)), "'x' would lie at bytes 8"),
        (file_of({"x": entry(shape=(3,))}, bytes(8)), "shape and the size of 'x' do"),
        (
            file_of({"x": entry(shape=(2**62, 2**62, 4), offsets=(0, 0))}),
            "shape and the size of 'x' do",
        ),
    ],
)
def test_damage_is_one_sentence(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        map_file(path)
    assert "model.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


def map_or_refuse(path, content):
    path.write_bytes(content)
    try:
        tensors = map_file(path)
    except UserError:
        return
    for view in tensors.values():
        assert view.nbytes <= len(content)
        view.tobytes()


WHOLE = save(TENSORS)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=4
    ),
    st.integers(0, len(WHOLE)),
)
def test_no_changed_byte_crashes(tmp_path_factory, changes, length):
    content = bytearray(WHOLE)
    for place, value in changes:
        content[place] = value
    map_or_refuse(tmp_path_factory.getbasetemp() / "bytes", bytes(content[:length]))


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
def test_no_header_crashes(tmp_path_factory, header):
    map_or_refuse(tmp_path_factory.getbasetemp() / "header", file_of(header, bytes(16)))


@pytest.mark.parametrize("name", ["../x.safetensors", "/x", "", "a/b", 7, None])
def test_an_index_cannot_leave_its_folder(tmp_path, name):
    (tmp_path / "x.safetensors").write_bytes(WHOLE)
    folder = tmp_path / "model"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="which is no file beside it"):
        SafetensorsFolder(folder)


def test_pickles_are_not_read(tmp_path: pathlib.Path):
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="can run code and are not read"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("shape", [[0, 10**30], [0, 2**47, 2**47], [0] + [1] * 64])
def test_impossible_shapes_without_elements_are_told(shape, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of({"x": entry("F32", shape, (0, 0))}))
    with pytest.raises(UserError, match="damaged"):
        map_file(path)
