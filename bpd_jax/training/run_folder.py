"""The folder of a training run: its files, and checks before a run uses it."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import subprocess
from typing import Any

import jax

from bpd_jax import files
from bpd_jax.data import tokenizer
from bpd_jax.data.rows import open_rows
from bpd_jax.data.text_task import SPLITS
from bpd_jax.errors import UserError
from bpd_jax.models.blockwise_config import load_config, save_config
from bpd_jax.training import checkpoints, metrics, run_lock, watch
from bpd_jax.training.config import TrainConfig

MODEL, TASK, VERSIONS = "model.json", "task.json", "versions.json"
CONFIG, OPERATIVE = "config.gin", "operative.gin"
# The folder of rows, and the file with the fingerprints of the run's rows.
DATA, ROWS = "data", "data.json"

_KNOWN = {
    run_lock.FILE_NAME,
    ROWS,
    MODEL,
    TASK,
    VERSIONS,
    CONFIG,
    OPERATIVE,
    DATA,
    tokenizer.FILE_NAME,
    metrics.FILE_NAME,
    metrics.DAMAGED,
    metrics.TENSORBOARD,
    checkpoints.FOLDER,
    watch.FOLDER,
}


def check_usable(folder: pathlib.Path, config: TrainConfig) -> None:
    """Raises a `UserError` unless the run can start or resume in `folder`.

    The folder may be missing, empty, hold only prepared rows, or hold an earlier part
    of a run of the same model on the same task. Nothing is written.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: choose another --workdir.")
    if not (folder / MODEL).exists():
        others = sorted(
            entry.name
            for entry in folder.iterdir()
            if entry.name not in _KNOWN and not entry.name.endswith(".part")
        )
        if others:
            raise UserError(
                f"{folder} holds {others[0]}, which is not part of a run: choose "
                "another --workdir."
            )
        return
    saved = load_config(folder / MODEL)
    _check_same(
        folder, MODEL, dataclasses.asdict(saved), dataclasses.asdict(config.model)
    )
    task = _read_object(folder / TASK)
    _check_same(folder, TASK, task, dataclasses.asdict(config.task))
    rows = initial_rows(folder)
    if rows is not None:
        train = rows.get("train")
        length = {"length": train.get("length") if isinstance(train, dict) else None}
        _check_same(folder, f"{DATA}/train", length, {"length": config.length})


def initial_rows(folder: pathlib.Path) -> dict[str, dict[str, Any]] | None:
    """Fingerprints of the rows that a run started with, by split; None for a new run.

    Raises:
      UserError: the fingerprints cannot be read.
    """
    # Exported parameters that are trained further have none.
    started = (folder / MODEL).exists() and (folder / ROWS).exists()
    return _read_object(folder / ROWS) if started else None


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object; raises a `UserError` if it cannot be read or is none."""
    try:
        content = files.read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return content
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}.") from error


def _check_same(folder: pathlib.Path, name: str, saved: dict, current: dict) -> None:
    old, new = _flatten(saved), _flatten(current)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            raise UserError(
                f"{folder} holds another run: {key} is {old.get(key)!r} in its {name} "
                f"and {new.get(key)!r} in this configuration; choose another "
                "--workdir, or use its configuration to resume it."
            )


def _flatten(fields: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in fields.items():
        name = prefix + key
        flat.update(
            _flatten(value, name + ".") if isinstance(value, dict) else {name: value}
        )
    return flat


def describe(
    folder: pathlib.Path, config: TrainConfig, text: str, operative: str
) -> None:
    """Writes the files that describe the run, `model.json`, which marks a run, last.

    The fingerprints of the rows and the tokenizer are written once, when the run
    starts.
    """
    started = (folder / MODEL).exists() and (folder / ROWS).exists()
    if not (started and (folder / tokenizer.FILE_NAME).exists()):
        with files.replacing_file(folder / tokenizer.FILE_NAME) as path:
            shutil.copyfile(folder / DATA / "train" / tokenizer.FILE_NAME, path)
    rows = {split: open_rows(folder / DATA / split).fingerprint for split in SPLITS}
    for name, content in {
        **({} if started else {ROWS: _json(rows)}),
        TASK: _json(dataclasses.asdict(config.task)),
        CONFIG: text,
        OPERATIVE: operative,
        VERSIONS: _json(versions()),
    }.items():
        with files.replacing_file(folder / name) as path:
            path.write_text(content, encoding="utf-8")
    with files.replacing_file(folder / MODEL) as path:
        save_config(config.model, path)


def versions() -> dict[str, str | None]:
    """Date, versions, git commit and devices of this run, as JSON."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{
            name: importlib.metadata.version(name)
            for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
        },
        "git_commit": _git_commit(),
        "device": jax.devices()[0].device_kind,
        "device_count": str(jax.device_count()),
    }


def _git_commit() -> str | None:
    """The commit of the source tree, with "+" if it has changes; None outside git."""
    root = pathlib.Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", os.fspath(root), *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
