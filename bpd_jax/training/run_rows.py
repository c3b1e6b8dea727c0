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
    """Makes the rows of both splits, unless they exist.

    A run resumes with its own rows, even if the text has changed. Missing or damaged
    rows are made again, if the result is the same.

    Raises:
      UserError: they cannot be made, or would differ.
    """
    begun = run_folder.begun_rows(folder)
    for split in SPLITS:
        target = folder / run_folder.DATA / split
        if begun is None:
            row_preparation.prepare_rows(config.task, split, config.length, target)
        elif _are_there(target, begun[split]):
            if not _same_source(config, split, begun[split]):
                say(
                    f"note: the text of the {split} split of {config.task.name} has "
                    "changed; the run resumes with the rows that it began with."
                )
        elif _same_source(config, split, begun[split]):
            row_preparation.prepare_rows(config.task, split, config.length, target)
        else:
            raise UserError(
                f"{target} does not hold the rows that the run began with, and they "
                f"cannot be made again, as the text of {config.task.name} has changed "
                "since: bring back the folder or the text, or choose another --workdir."
            )


def open_run_rows(
    config: TrainConfig, folder: pathlib.Path
) -> tuple[PackedRows, PackedRows]:
    """Opens the training and validation rows that `make_run_rows` has made.

    Raises:
      UserError: there are none, or the model's vocabulary size differs.
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


def _are_there(target: pathlib.Path, fingerprint: dict) -> bool:
    try:
        return open_rows(target).fingerprint == fingerprint
    except UserError:
        return False


def _same_source(config: TrainConfig, split: str, fingerprint: dict) -> bool:
    """Whether rows made now would have this fingerprint, as far as can be checked."""
    try:
        now = row_preparation.rows_fingerprint(config.task, split, config.length)
    except UserError:
        return False
    return now.items() <= fingerprint.items()
