"""Damaged files of our own formats are read, or refused in one sentence."""

import copy
import gc
import json
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

from bpd_jax.base.errors import UserError
from tests.damage_examples import FORMATS, Format

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


def made(name: str, tmp_path: pathlib.Path) -> tuple[pathlib.Path, Format]:
    """A folder with a valid example of a format, and the format."""
    example, folder = FORMATS[name], tmp_path / "folder"
    folder.mkdir()
    example.make(folder)
    example.read(folder)
    return folder, example


@pytest.fixture(params=[*(f"json_{name}" for name in NAMES), "ngram_model"])
def artifact(request, tmp_path):
    """The folder of an artifact, the path of its header, and its format."""
    folder, example = made(request.param, tmp_path)
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


# All but descriptions and records of studies, which are above and below; every file of
# a checkpoint is damaged in `training/checkpoints_test`.
ARRAYS = ("arrays_heads", "arrays_drafter", "arrays_refiner", "generations", "rows")
CHECKED = ("ngram_model", "ngram_counts", "parts")


@pytest.mark.parametrize("name", [*ARRAYS, *CHECKED, "arpa"])
def test_incomplete_files_are_refused(name, tmp_path):
    """Missing, empty or cut; with another byte, too, where there are checksums."""
    folder, example = made(name, tmp_path)
    for path in sorted(path for path in folder.glob(example.files) if path.is_file()):
        data = path.read_bytes()
        changes = [b"", data[: len(data) // 2], data[:-9]]
        if name in CHECKED:
            changes.append(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
        for changed in changes:
            path.write_bytes(changed)
            with pytest.raises(UserError, match=path.name):
                example.read(folder)
        path.unlink()
        if name != "generations":  # One of several shards may be absent.
            with pytest.raises(UserError):
                example.read(folder)
        path.write_bytes(data)
    example.read(folder)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A copy that is truncated, or has other bits, bytes or numbers."""
    # In half of the cases within the header.
    size = max(len(data), 1)
    offset = rng.randrange(min(size, 256) if rng.random() < 0.5 else size)
    piece = data[offset : offset + 1 + int(rng.expovariate(0.05))]
    flipped = bytes([(data[offset] if data else 0) ^ 1 << rng.randrange(8)])
    number = rng.choice((b"-1", b"1e400", b"NaN", b"99999999999999999999", b"1" * 5000))
    word = rng.choice((0, 1, 2**31 - 1, 2**32 - 1)).to_bytes(8, "little")
    middle = rng.choice((b"", flipped, piece * 2, piece * 1000, number, word, b"\xff"))
    rest = data[offset + max(len(middle), 1) :] if len(middle) < 9 else data[offset:]
    return data[:offset] + rng.choice((b"", middle + rest, middle + rest))


# Orbax does not await the other arrays after one could not be read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_random_damage_is_read_or_refused(name, tmp_path):
    folder, example = made(name, tmp_path)
    original = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    targets = sorted(path for path in folder.glob(example.files) if path in original)
    for number in range(10 if name == "checkpoint" else 20):
        rng = random.Random(f"0 {number}")
        path = rng.choice(targets)
        path.write_bytes(damaged(original[path], rng))
        if example.reseal is not None and rng.random() < 0.7:
            example.reseal(folder)
        refusal = ""
        try:
            example.read(folder)
        except UserError as error:
            refusal = str(error)
        assert "\n" not in refusal
        for changed, data in original.items():
            changed.write_bytes(data)
    if name == "checkpoint":
        gc.collect()  # The warnings about these reads belong to this test.
