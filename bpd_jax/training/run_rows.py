"""The packed rows of a run, which do not change after it has started."""

import pathlib

from bpd_jax.data import row_preparation
from bpd_jax.data.rows import PackedRows, open_rows
from bpd_jax.data.text_task import SPLITS
from bpd_jax.errors import UserError
from bpd_jax.training import run_folder
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.distributed import say


def make_run_rows(config: TrainConfig, folder: pathlib.Path) -> None:
    """Prepares the rows of both splits unless they exist.

    A run resumes with its own rows, even if the text has changed. Missing or damaged
    rows are prepared again if the text has not changed.

    Raises:
      UserError: the rows cannot be prepared, or would differ from those of the run.
    """
    initial = run_folder.initial_rows(folder)
    for split in SPLITS:
        target = folder / run_folder.DATA / split
        if initial is None:
            row_preparation.prepare_rows(config.task, split, config.length, target)
        elif _exist(target, initial[split]):
            if not _same_source(config, split, initial[split]):
                say(
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
    """Opens the training and validation rows that `make_run_rows` has prepared.

    Raises:
      UserError: a split has no rows, or the model's vocabulary size differs.
    """
    both = [open_rows(folder / run_folder.DATA / split) for split in SPLITS]
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
