"""Checks shared by all kinds of artifacts; those of one kind are tested with it."""

import json

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.storage import array_files
from bpd_jax.storage.artifacts import Artifact
from bpd_jax.storage.tensors import read_tensors

KIND = Artifact("a thing", "thing.json", ("x.*",), '"size"', remedy="make it again")
ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz"])
def test_artifacts_round_trip(tmp_path, name):
    folder = tmp_path / "thing"
    KIND.write(folder, {"size": 1}, name, {})
    KIND.write(folder, {"size": 2}, name, ARRAYS)
    header = {"artifact": "a thing", "version": 1, "size": 2}
    assert KIND.read_header(folder, {"size": int}) == header
    path = folder / name
    if name.endswith(".npz"):
        arrays = array_files.read_npz(path)
    else:
        arrays, _ = read_tensors(path)
    np.testing.assert_array_equal(arrays["a"], ARRAYS["a"], strict=True)
    assert sorted(path.name for path in folder.iterdir()) == ["thing.json", name]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    "header, message",
    [
        ("{", "Expecting"),
        ("[]", "thing.json"),
        ('{"format": 2, "size": 1}', "not of format 1"),
        ('{"artifact": "another thing", "version": 1, "size": 1}', "header of a thing"),
        ('{"format": 1}', "size"),
        ('{"format": 1, "size": NaN}', "NaN"),
    ],
)
def test_a_damaged_header_is_reported_with_the_remedy(tmp_path, header, message):
    (tmp_path / "thing.json").write_text(header)
    with pytest.raises(UserError, match=message) as caught:
        KIND.read_header(tmp_path, {"size": int})
    assert str(caught.value).endswith("make it again.")


def test_a_missing_header_is_reported_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "nowhere", tmp_path / "file", tmp_path):
        with pytest.raises(UserError, match=r"not hold a thing: .*; make it again"):
            KIND.read_header(folder)


def test_folders_of_another_kind_are_not_replaced(tmp_path):
    (tmp_path / "thing.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(UserError, match="not that of a thing"):
        KIND.write(tmp_path, {"size": 1}, "x.npz", ARRAYS)
    assert [path.name for path in tmp_path.iterdir()] == ["thing.json"]
