"""The folder of a training run: its files, its rows, and checks before its use."""

import dataclasses
import datetime
import os
import pathlib
import platform
import shutil
import subprocess
from typing import Any

import jax
from flax import traverse_util

from bpd_jax.base import provenance
from bpd_jax.base.errors import UserError
from bpd_jax.data import row_preparation, tokenizer
from bpd_jax.data.rows import PackedRows, open_rows
from bpd_jax.data.text_task import SPLITS
from bpd_jax.models.config_files import load_config, save_config
from bpd_jax.storage import files, paths
from bpd_jax.storage.paths import local_copy
from bpd_jax.training import metrics
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.hosts import print_once
from bpd_jax.training.run_names import CHECKPOINTS, MODEL, TASK, whole_steps

VERSIONS = "versions.json"
CONFIG, OPERATIVE = "config.gin", "operative.gin"
# The folder of rows, and the file with the fingerprints of the run's rows.
DATA, ROWS = "data", "data.json"

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_KNOWN = {
    ROWS,
    MODEL,
    TASK,
    VERSIONS,
    CONFIG,
    OPERATIVE,
    DATA,
    tokenizer.FILE_NAME,
    metrics.FILE_NAME,
    metrics.TENSORBOARD,
    CHECKPOINTS,
}


def check_usable(folder: pathlib.Path, config: TrainConfig) -> None:
    """Checks that the run can start or resume in `folder`.

    The folder may be missing, empty, hold only prepared rows or exported parameters,
    or hold an earlier part of a run of the same model on the same task. Nothing is
    written.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: choose another --workdir.")
    if whole_steps(folder / CHECKPOINTS):
        for name in (MODEL, ROWS):
            if not (folder / name).exists():
                raise UserError(
                    f"{folder} has checkpoints but no {name}: restore the file, or "
                    "choose another --workdir."
                )
    if not (folder / MODEL).exists():
        others = sorted(
            entry.name
            for entry in folder.iterdir()
            if entry.name not in _KNOWN and not paths.is_temporary(entry.name)
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
        length = {"length": rows["train"].get("length")}
        _check_same(folder, f"{DATA}/train", length, {"length": config.length})


def initial_rows(folder: pathlib.Path) -> dict[str, dict[str, Any]] | None:
    """Fingerprints of the first rows of a run, by split; None for a new run."""
    # Exported parameters that are trained further have none.
    if not ((folder / MODEL).exists() and (folder / ROWS).exists()):
        return None
    rows = _read_object(folder / ROWS)
    for split in SPLITS:
        if not isinstance(rows.get(split), dict):
            raise UserError(
                f"cannot read {folder / ROWS}: it does not describe the rows of the "
                f"{split} split."
            )
    return rows


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        content = files.read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return content
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}.") from error


def _check_same(folder: pathlib.Path, name: str, saved: dict, current: dict) -> None:
    old, new = (traverse_util.flatten_dict(x, sep=".") for x in (saved, current))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            raise UserError(
                f"{folder} holds another run: {key} is {old.get(key)!r} in its {name} "
                f"and {new.get(key)!r} in this configuration; choose another "
                "--workdir, or use its configuration to resume it."
            )


def make_run_rows(config: TrainConfig, folder: pathlib.Path) -> None:
    """Prepares the rows of both splits unless they exist.

    A run resumes with its own rows, even if the text has changed. Missing or damaged
    rows are prepared again if the text has not changed.
    """
    initial = initial_rows(folder)
    for split in SPLITS:
        target = folder / DATA / split
        if initial is None:
            row_preparation.prepare_rows(config.task, split, config.length, target)
        elif _exist(target, initial[split]):
            if not _same_source(config, split, initial[split]):
                print_once(
                    f"note: the text of the {split} split of {config.task.name} has "
                    "changed; the run resumes with the rows that it started with."
                )
        elif _same_source(config, split, initial[split]):
            row_preparation.prepare_rows(config.task, split, config.length, target)
        else:
            raise UserError(
                f"{target} does not hold the rows that the run started with, and they "
                "cannot be prepared again because the text of "
                f"{config.task.name} has changed: restore the folder or the text, or "
                "choose another --workdir."
            )


def open_run_rows(
    config: TrainConfig, folder: pathlib.Path
) -> tuple[PackedRows, PackedRows]:
    """Opens the training and validation rows that `make_run_rows` has prepared."""
    both = [open_rows(folder / DATA / split) for split in SPLITS]
    train_rows, validation_rows = both
    vocab_size = config.model.trunk.vocab_size
    if train_rows.vocab_size != vocab_size:
        raise UserError(
            f"the vocabulary {config.task.vocabulary} has {train_rows.vocab_size} "
            f"tokens but TransformerConfig.vocab_size is {vocab_size}: set it to "
            f"{train_rows.vocab_size}, or to @vocabulary_size()."
        )
    for rows in both:
        if not len(rows):
            raise UserError(
                f"the {rows.split} split of {config.task.name} has no rows: give more "
                "text."
            )
    return train_rows, validation_rows


def _exist(target: pathlib.Path, fingerprint: dict) -> bool:
    try:
        return open_rows(target).fingerprint == fingerprint
    except UserError:
        return False


def _same_source(config: TrainConfig, split: str, fingerprint: dict) -> bool:
    """Whether the text and the settings are those of rows with this fingerprint."""
    try:
        current = row_preparation.rows_fingerprint(config.task, split, config.length)
    except UserError:
        return False
    return current.items() <= fingerprint.items()


def write_run_files(
    folder: pathlib.Path, config: TrainConfig, text: str, operative: str
) -> None:
    """Writes the files that describe the run, `model.json`, which marks a run, last.

    The fingerprints of the rows and the tokenizer are written once, when the run
    starts.
    """
    started = (folder / MODEL).exists() and (folder / ROWS).exists()
    if not (started and (folder / tokenizer.FILE_NAME).exists()):
        with files.replacing_file(folder / tokenizer.FILE_NAME) as path:
            stored = local_copy(folder / DATA / "train" / tokenizer.FILE_NAME)
            shutil.copyfile(stored, path)
    if not started:
        rows = {x: open_rows(folder / DATA / x).fingerprint for x in SPLITS}
        files.write_json(folder / ROWS, rows)
    files.write_json(folder / TASK, dataclasses.asdict(config.task))
    files.write_json(folder / VERSIONS, versions())
    write_configuration(folder, text, operative)
    with files.replacing_file(folder / MODEL) as path:
        save_config(config.model, path)


def write_configuration(folder: pathlib.Path, text: str, operative: str) -> None:
    """Writes the gin text of a run and its operative configuration."""
    for name, content in ((CONFIG, text), (OPERATIVE, operative)):
        files.write_text(folder / name, content)


def versions() -> dict[str, str | None]:
    """Date, versions, git commit and devices of this run, as JSON."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **provenance.package_versions(_PACKAGES),
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
