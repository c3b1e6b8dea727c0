"""Settings that others wrote as JSON, checked as they are read."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from bpd_jax.errors import UserError

# The longest index of a published model has a few megabytes.
_MOST_BYTES = 100_000_000


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns a file of UTF-8.

    Raises:
      UserError: it is missing, unreadable, too large or something else.
    """
    path = pathlib.Path(path)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"{path} is larger than {_MOST_BYTES:,} bytes: wrong file?")
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file: it is not UTF-8.") from error


def parse_object(text: str | bytes, source: str) -> dict[str, Any]:
    """Parses one JSON object.

    Raises:
      UserError: it is damaged or no object; `source` says where it was.
    """
    try:
        value = json.loads(text)
    # Brackets may nest deeper than the parser can follow.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{source} is not a JSON object with named fields.")
    # An escape such as \\ud800 stands for half a character, which nothing can print.
    if ("\\u" if isinstance(text, str) else b"\\u") in text:  # type: ignore[operator]
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{source} is not valid JSON: it holds a lone surrogate."
            ) from error
    return value


@dataclasses.dataclass(frozen=True)
class Fields:
    """A JSON object whose fields are asked for by type; null is as good as absent.

    Attributes:
      values: by name.
      source: where they are from, for error messages.
    """

    values: Mapping[str, Any]
    source: str

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Fields":
        """Reads a JSON file.

        Raises:
          UserError: it is missing, damaged or no object.
        """
        return cls(parse_object(read_text(path), str(path)), str(path))

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; without a default it must be there."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise self._wrong(name, "a finite number")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number; without a default it must be there."""
        value = self.number(name, default)
        if not value.is_integer():
            raise self._wrong(name, "a whole number")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; without a default it must be there."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def items(self, name: str) -> list[Any]:
        """A list; a single value is a list of one, and an absent one is empty."""
        value = self.values.get(name)
        if value is None:
            return []
        return value if isinstance(value, list) else [value]

    def fields(self, name: str) -> "Fields":
        """A nested object, empty if absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(value, f"{name} of {self.source}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise UserError(f"{self.source} does not say {name}.")
        return value

    def _wrong(self, name: str, wanted: str) -> UserError:
        value = self.values.get(name)
        return UserError(f"{name} in {self.source} must be {wanted}, not {value!r}.")
