"""Tests of bpd_jax.ngrams.storage."""

import json
import pathlib
import resource

import numpy as np
import pytest

from bpd_jax.errors import UserError
from bpd_jax.ngrams import storage
from bpd_jax.ngrams.model import NGramModel


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def change_a_byte(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def exchange(path: pathlib.Path) -> None:
    path.write_bytes((path.parent / "keys_1.npy").read_bytes())


@pytest.mark.parametrize(
    "damage", [truncate, change_a_byte, exchange, pathlib.Path.unlink]
)
def test_a_damaged_array_is_noticed(
    trigrams: NGramModel, tmp_path: pathlib.Path, damage
) -> None:
    trigrams.save(tmp_path / "model")
    damage(tmp_path / "model" / "log_probs_2.npy")
    with pytest.raises(UserError, match=r"log_probs_2\.npy"):
        NGramModel.load(tmp_path / "model")


def test_truncation_is_noticed_without_reading_the_arrays(
    trigrams: NGramModel, tmp_path: pathlib.Path
) -> None:
    trigrams.save(tmp_path / "model")
    truncate(tmp_path / "model" / "keys_3.npy")
    with pytest.raises(UserError, match=r"keys_3\.npy"):
        NGramModel.load(tmp_path / "model", verify=False)


def test_a_write_that_stops_short_is_told(tmp_path: pathlib.Path) -> None:
    # A limit on files: numpy says how much it wrote, and no reason.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"model: .* written; the disk may be full"):
            storage.write_folder(tmp_path / "model", {"a": np.zeros(50_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change, message",
    [
        (None, "cannot read .* give a folder that holds an n-gram model"),
        ("{", "damaged"),
        ('{"magic": "something"}', "not the header"),
        ({"version": 99}, "format 99"),
        ({"settings": {}}, "damaged"),
        ({"arrays": {}}, "damaged"),
    ],
)
def test_a_foreign_header_is_refused(
    trigrams: NGramModel, tmp_path: pathlib.Path, change, message: str
) -> None:
    trigrams.save(tmp_path / "model")
    header = tmp_path / "model" / "ngram_model.json"
    if change is None:
        header.unlink()
    elif isinstance(change, str):
        header.write_text(change)
    else:
        header.write_text(json.dumps(json.loads(header.read_text()) | change))
    with pytest.raises(UserError, match=message):
        NGramModel.load(tmp_path / "model")
