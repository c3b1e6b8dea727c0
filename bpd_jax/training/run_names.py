"""Names in a run folder, and its checkpoints, without the libraries that read them."""

import pathlib

from bpd_jax.storage.paths import in_bucket

MODEL, TASK, CHECKPOINTS = "model.json", "task.json", "checkpoints"

# Orbax writes this file last under gs://, where folders cannot be renamed.
_COMMITTED = "commit_success.txt"


def whole_steps(folder: pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, from their names."""
    if in_bucket(folder):
        names = (path.parent.name for path in folder.glob(f"*/{_COMMITTED}"))
        return sorted(int(name) for name in names if name.isdigit())
    if not folder.is_dir():
        return []
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
