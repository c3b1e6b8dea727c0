"""The JSON files that the benchmarks write."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from bpd_jax.base import provenance
from bpd_jax.storage import files


def about(name: str) -> dict[str, Any]:
    """The first fields of every file: command, date, device and versions."""
    return {
        "command": " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]]),
        "date": provenance.today(),
        "device": provenance.device(),
        "versions": provenance.versions(),
    }


def write(
    path: str | os.PathLike[str], result: Mapping[str, Any], *, indent: int = 2
) -> None:
    """Writes a result atomically."""
    files.write_json(path, result, indent=indent)
