"""JSON files of other programs, whose fields are validated when they are read."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path

CONFIG = "config.json"
"""The file of a Hugging Face folder that describes the model."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """A JSON object with typed access to its fields; null counts as absent.

    Attributes:
      values: the fields by name.
      source: the origin, for error messages.
    """

    values: Mapping[str, Any]
    source: str

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, optional: bool = False) -> "Fields":
        """Reads a JSON file; if it is optional, there are no fields without it."""
        if optional and not as_path(path).is_file():
            return cls({}, str(path))
        try:
            values = files.read_json(path)
            # Fails for a lone surrogate such as \ud800.
            json.dumps(values, ensure_ascii=False).encode()
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot read {path}: {reason}.") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not valid JSON: {error}.") from error
        if not isinstance(values, dict):
            raise UserError(f"{path} is not a JSON object with named fields.")
        return cls(values, str(path))

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def number(self, name: str, default: float | None = None) -> float:
        """A number; required unless there is a default."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer; required unless there is a default."""
        value = self.number(name, default)
        if not value.is_integer():
            raise self._wrong(name, "an integer")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required unless there is a default."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
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
            raise UserError(f"{self.source} has no field {name}.")
        return value

    def _wrong(self, name: str, expected: str) -> UserError:
        value = self.values.get(name)
        return UserError(f"{name} in {self.source} must be {expected}, not {value!r}.")
