"""Where the model is, if a folder that was named as one is none."""

import pathlib
from collections.abc import Iterable

from bpd_jax.formats.json_files import CONFIG, Fields

_MOST = 3  # Names that are listed.


def nearest(path: pathlib.Path) -> str:
    """What a folder is instead of a model, and what to give; empty if unknown."""
    if found := _listed(path.glob("*.gguf")):
        return f"it contains GGUF files: give {found}"
    # The cache of the hub: FOLDER/models--ORG--NAME/snapshots/COMMIT.
    snapshots = [*path.glob("snapshots/*"), *path.glob("models--*/snapshots/*")]
    # Also the folder above a model.
    if found := _listed(
        folder
        for folder in (*snapshots, *path.glob("*"))
        if (folder / CONFIG).is_file()
    ):
        return f"a model is in a folder below it: give {found}"
    if (path / "adapter_config.json").is_file():
        about = Fields.read(path / "adapter_config.json")
        base = about.text("base_model_name_or_path", "its base model")
        return (
            f"it is an adapter of {base}: merge them (merge_and_unload of peft), and "
            "give the folder to which that model is saved"
        )
    if (path / "params.json").is_file() or any(path.glob("consolidated.*")):
        return (
            "it has the format of its authors (params.json, consolidated.*): give the "
            "folder for transformers of the same model, with config.json"
        )
    if (path.parent / CONFIG).is_file():
        return f"a model is in the folder above it: give {path.parent}"
    return ""


def _listed(paths: Iterable[pathlib.Path]) -> str:
    first = sorted(map(str, paths))[:_MOST]
    return " or ".join(first)
