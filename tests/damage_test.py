"""Readers of our own JSON files accept any content or raise a `UserError`."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from bpd_jax.base.errors import UserError
from tests.mutation_formats import FORMATS

NAMES = (
    *("model", "heads", "drafter", "refiner", "texts"),
    *("rows", "study", "task", "choice", "accuracies"),
)
INVALID_JSON = [
    b"", b"\xff", b"{", b"[]", b"null", b"1", b'"x"', b"NaN", b"-Infinity",
    b"1e999", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5_000,
]  # fmt: skip
VALUES = [
    *(None, [], {}, [1], {"a": 1}, "x", -1, 0, 2**70, 10**400, 1e300, True, "\ud800")
]


def mutated(value: Any) -> Iterator[Any]:
    """The value with each part of it missing or replaced by each of `VALUES`."""
    yield from VALUES
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            for part in mutated(value[key]):
                changed = copy.copy(value)
                changed[key] = part
                yield changed
            changed = copy.copy(value)
            del changed[key]
            yield changed


@pytest.fixture(params=[*(f"json_{name}" for name in NAMES), "ngram_model"])
def artifact(request, tmp_path):
    """The folder of an artifact, the path of its header, and its format."""
    example, folder = FORMATS[request.param], tmp_path / "folder"
    folder.mkdir()
    example.make(folder)
    example.read(folder)
    [header] = (p for p in folder.glob(example.files) if p.suffix == ".json")
    return folder, header, example


def test_damaged_json_is_reported(artifact):
    folder, header, example = artifact
    for data in INVALID_JSON:
        header.write_bytes(data)
        with pytest.raises(UserError):
            example.read(folder)
    header.unlink()
    header.mkdir()
    with pytest.raises(UserError):
        example.read(folder)


def test_changed_values_are_accepted_or_reported(artifact):
    folder, header, example = artifact
    reported = 0
    for value in mutated(json.loads(header.read_text())):
        header.write_text(json.dumps(value))
        if example.reseal is not None:
            example.reseal(folder)
        try:
            example.read(folder)
        except UserError:
            reported += 1
    assert reported > len(VALUES) // 2
