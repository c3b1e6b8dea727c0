"""The formats that `tests/mutations.py` damages, by name."""

import gzip
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

from tests.mutations import Format

FORMATS: dict[str, Format] = {}


def add(name: str, *arguments: Any, **named: Any) -> None:
    """Adds a format; the arguments are those of `Format`."""
    assert name not in FORMATS, name
    FORMATS[name] = Format(*arguments, **named)


def written(name: str, text: str) -> Callable[[pathlib.Path], object]:
    """Returns a function that writes a text, compressed if the name ends in .gz."""
    data = text.encode()

    def write(folder: pathlib.Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)

    return write


def unpacked(path: pathlib.Path) -> None:
    """Replaces an .npz file by its arrays, in a folder of the same name."""
    with zipfile.ZipFile(path) as archive:
        archive.extractall(path.with_suffix(""))
    path.unlink()


def packed(path: pathlib.Path) -> None:
    """Writes `unpacked` arrays as an .npz file with checksums of the damaged data."""
    with zipfile.ZipFile(path, "w") as archive:
        for array in sorted(path.with_suffix("").iterdir()):
            archive.write(array, array.name)
