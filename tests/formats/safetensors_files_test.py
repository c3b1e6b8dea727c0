import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import save

from bpd_jax.base.errors import UserError
from bpd_jax.formats.safetensors_files import SafetensorsFiles, open_checkpoint

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2], np.float16),
    "c": np.array([[3]], np.int64),
    "empty": np.zeros((0, 4), np.float32),
}


def file_of(header, data=b""):
    text = json.dumps(header).encode()
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


DAMAGED = [
    b"1234567",
    file_of({"x": entry("F8_E4M3", (8,))}, bytes(8)),
    file_of({"x": entry()}, bytes(7)),
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


@pytest.mark.parametrize("name", ["../x.safetensors", 7])
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
