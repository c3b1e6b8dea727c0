"""Settings of refiners, and their data: packed rows, or cached states of the model.

Packed rows are those with which the model was trained; training runs the model on them.
Cached states come from a training of heads (`training.heads.states_cache`): the model
has already read its own texts, which is most of the work.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Count, Natural, Positive, Validated, choice
from bpd_jax.base.typing import Params
from bpd_jax.data.rows import Batch, PackedRows, RowIterator, open_rows
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.trained_refiners import REFINER_KINDS, RefinerConfig
from bpd_jax.models.transformer_config import Rank, Size
from bpd_jax.storage.paths import as_path
from bpd_jax.training.heads.batches import PositionBatch, PositionBatcher
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.heads.positions import split_texts
from bpd_jax.training.heads.states_cache import STATES, open_states
from bpd_jax.training.heads.states_files import HEADER as STATES_HEADER
from bpd_jax.training.refiner_loss import (
    BaseOutputs,
    outputs_of_rows,
    outputs_of_states,
)
from bpd_jax.training.run_folder import DATA

TARGETS = ("model", "text")


@dataclasses.dataclass(frozen=True)
class RefinerSettings(Validated):
    """A refiner and its training; every field is a flag of `bpd_jax.train_refiner`.

    Attributes:
      kind: `markov`, `recurrent` or `hydra`.
      targets: training targets: `model` for the model's own next tokens, which are what
        verification accepts, or `text` for the tokens of the text.
      steps: number of training steps.
      batch_size: rows of a step, or positions of cached states; None for 16 rows or
        2048 positions.
      learning_rate: highest learning rate, after a short warmup and before a cosine
        decay.
      rank: rank of the correction; None for the default of the kind.
      width: width of the recurrent state or of a Hydra head's layer; None for the
        default of the kind.
      seed: seed of the initial parameters and of the order of the rows.
      heldout_rows: highest number of rows of the validation split for the evaluation at
        the end; with cached states, 2 % of the texts are evaluated.
    """

    prefix = "--"

    kind: Annotated[str, choice(*REFINER_KINDS)]
    targets: Annotated[str, choice(*TARGETS)] = "model"
    steps: Count = 1000
    batch_size: Count | None = None
    learning_rate: Positive = 1e-2
    rank: Rank | None = None
    width: Size | None = None
    seed: Natural = 0
    heldout_rows: Count = 1000

    def config_for(self, model: BlockwiseConfig) -> RefinerConfig:
        """The configuration of a refiner for `model`."""
        if model.block_size < 2:
            raise UserError(
                "the model has no block heads whose drafts could be refined: train it "
                "with BlockHeadsConfig.num_heads of 2 or more."
            )
        kind = REFINER_KINDS[self.kind]
        sizes: dict[str, int] = {}
        for name in ("rank", "width"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in {field.name for field in dataclasses.fields(kind)}:
                raise UserError(f"--{name} does not apply to --kind={self.kind}.")
            sizes[name] = value
        trunk = model.trunk
        return kind(trunk.vocab_size, trunk.d_model, model.block_size, **sizes)


ROWS, POSITIONS = 16, 2048


class RefinerData(NamedTuple):
    """Batches, and the function that runs the frozen model on one of them.

    Attributes:
      train: returns endless batches, beginning at the given step.
      freeze: `(model, base, batch, model_targets) → BaseOutputs`; see `refiner_loss`.
      unit: `positions` or `rows`.
      key: identifies the data.
    """

    train: Callable[[int], Iterator[Any]]
    held_out: Sequence[Any]
    freeze: Callable[..., BaseOutputs]
    batch_size: int
    unit: str
    key: str


def default_data(folder: pathlib.Path) -> pathlib.Path:
    """The folder of rows, or else of cached states, in the folder of a model."""
    rows, states = folder / DATA, folder / STATES
    if rows.is_dir():
        return rows
    if (states / STATES_HEADER).is_file():
        return states
    raise UserError(
        f"there is no training data: neither packed rows in {rows} nor cached states "
        f"in {states}; train the model or its heads here first, or name a folder with "
        "--data."
    )


def open_source(
    data: str | os.PathLike[str],
    settings: RefinerSettings,
    model: BlockwiseConfig,
    base: Params,
) -> RefinerData:
    """Opens a folder of packed rows or of cached states."""
    folder = as_path(data)
    if (folder / STATES_HEADER).exists():
        return _states(folder, settings, model, base)
    train, validation = (
        _open_rows(folder / split, model) for split in ("train", "validation")
    )
    size = settings.batch_size or ROWS

    def batches(step: int) -> RowIterator:
        rows = RowIterator(train, size, settings.seed)
        rows.restore(rows.state() | {"given": step * size})
        return rows

    held_out = held_out_rows(validation, size, settings.heldout_rows)
    key = json.dumps([train.fingerprint, validation.fingerprint, len(train)])
    return RefinerData(batches, held_out, outputs_of_rows, size, "rows", key)


def held_out_rows(rows: PackedRows, size: int, limit: int) -> list[Batch]:
    """Batches of at most `limit` rows, evenly spaced; the last batch is padded."""
    count = min(limit, len(rows))
    picked = np.arange(count) * len(rows) // count
    batches = []
    for first in range(0, count, size):
        batch = rows.batch(picked[first : first + size])
        missing = size - len(batch.tokens)
        batches.append(Batch(*(np.pad(x, ((0, missing), (0, 0))) for x in batch)))
    return batches


def _states(
    folder: pathlib.Path,
    settings: RefinerSettings,
    model: BlockwiseConfig,
    base: Params,
) -> RefinerData:
    states = open_states(folder, fingerprint(model, base))
    # With the defaults and the seed of the training of heads, the same texts are held
    # out.
    train, held_out_positions = split_texts(
        states.positions,
        HeadsTrainConfig.held_out,
        HeadsTrainConfig.held_out_positions,
        settings.seed,
    )
    if not len(train) or not len(held_out_positions):
        raise UserError(f"{folder} has too few texts to train on and to hold out.")
    size, block = settings.batch_size or POSITIONS, model.block_size
    batcher = PositionBatcher(states, size, block)
    held_out = batcher.held_out(held_out_positions)

    def batches(step: int) -> Iterator[PositionBatch]:
        return batcher.batches(train, settings.seed, step)

    key = hashlib.sha256(states.positions.tokens.tobytes()).hexdigest()
    return RefinerData(batches, held_out, outputs_of_states, size, "positions", key)


def _open_rows(folder: pathlib.Path, model: BlockwiseConfig) -> PackedRows:
    rows = open_rows(folder)
    if not len(rows):
        raise UserError(f"{folder} holds no rows.")
    if rows.vocab_size != model.trunk.vocab_size:
        raise UserError(
            f"{folder} has a vocabulary of {rows.vocab_size} tokens and the model has "
            f"{model.trunk.vocab_size}: use the rows that the model was trained on."
        )
    if rows.length > model.trunk.max_length:
        raise UserError(
            f"{folder} has rows of {rows.length} tokens, which exceeds the model's "
            f"max_length of {model.trunk.max_length}: use shorter rows."
        )
    return rows
