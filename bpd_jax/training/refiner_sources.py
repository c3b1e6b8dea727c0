"""Settings of refiners, and what they are trained on: rows, or cached states.

Packed rows are those with which the model was trained; training runs the model on them.
Cached states come from a training of heads (`training.heads.states_cache`): the model
has already read its own texts, which is most of the work.

With teacher forcing, the earlier tokens of a block are those of the text, so all levels
of all positions are trained at once. n is the number of positions, B × T for packed
rows.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Count, Path, choice, configurable
from bpd_jax.base.typing import Array, Bool, Float, Int, Params
from bpd_jax.data.rows import Batch, PackedRows, RowIterator, open_rows
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.segment_attention import Segments
from bpd_jax.models.trained_refiners import MarkovConfig
from bpd_jax.models.transformer_config import Rank
from bpd_jax.storage.paths import as_path
from bpd_jax.training.config import FrozenConfig
from bpd_jax.training.heads.batches import PositionBatch, PositionBatcher
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.heads.positions import split_texts
from bpd_jax.training.heads.states_cache import STATES, open_states
from bpd_jax.training.heads.states_files import HEADER as STATES_HEADER
from bpd_jax.training.loss import head_targets
from bpd_jax.training.run_folder import DATA

TARGETS = ("model", "text")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RefinerTrainConfig(FrozenConfig):
    """The settings of a training run of a refiner.

    `batch_size` of None is 16 rows, or 2048 positions of cached states.

    Attributes:
      model: name or folder of the frozen model, whose block heads are refined.
      heads: folder of block heads for a pretrained model; None for its own.
      data: folder of packed rows, with train/ and validation/, or of the cached states
        of heads training; None for data/ in the folder of the model, or else states/.
      targets: training targets: `model` for the model's own next tokens, which are what
        verification accepts, or `text` for the tokens of the text.
      steps: number of steps of the whole run.
      rank: rank of the correction.
      held_out_rows: highest number of rows of the validation split for an evaluation;
        with cached states, 2 % of the texts are evaluated.
    """

    model: Path
    heads: Path | None = None
    data: Path | None = None
    targets: Annotated[str, choice(*TARGETS)] = "model"
    steps: Count = 1000
    rank: Rank = MarkovConfig.rank
    held_out_rows: Count = 1000

    def config_for(self, model: BlockwiseConfig) -> MarkovConfig:
        """The configuration of a refiner for `model`."""
        if model.block_size < 2:
            raise UserError(
                "the model has no block heads whose drafts could be refined: train it "
                "with BlockHeadsConfig.num_heads of 2 or more."
            )
        trunk = model.trunk
        return MarkovConfig(
            trunk.vocab_size, trunk.d_model, model.block_size, self.rank
        )


class BaseOutputs(NamedTuple):
    """The outputs of the frozen model on a batch, and the targets.

    States are those of the block heads of levels 1 … L-1; `tokens` are y_0 … y_{L-1},
    those after every position.
    """

    states: Float[Array, "n levels D"]
    tokens: Int[Array, "n L"]
    targets: Int[Array, "n levels"]
    valid: Bool[Array, "n levels"]


def outputs_of_rows(
    model: BlockwiseConfig, base: Params, batch: Batch, *, model_targets: bool
) -> BaseOutputs:
    """Runs the frozen model and its block heads on B rows of T tokens.

    With `model_targets` the target of level j at position i is the model's own most
    probable token at i + j, given the text up to there, which is what greedy
    verification accepts; otherwise that of the text.
    """
    tokens, segment_ids, positions, loss_mask = (jnp.asarray(x) for x in batch)
    run = functools.partial(BlockwiseLM(model).apply, {"params": base})
    hidden, *_ = run(tokens, positions, Segments(segment_ids))
    states = run(hidden, method="head_states")
    after, valid = head_targets(tokens, segment_ids, loss_mask, model.block_size)
    targets = after[1:]
    if model_targets:
        best = run(hidden, method="next_token_logits").argmax(-1)
        targets = jnp.stack(
            [jnp.roll(best, -level, axis=1) for level in range(1, model.block_size)]
        )
    by_position = (x.reshape(len(x), -1).T for x in (after, targets, valid[1:]))
    levels = states[..., 1:, :].reshape(-1, *states[0, 0, 1:].shape)
    return BaseOutputs(levels, *by_position)


def outputs_of_states(
    model: BlockwiseConfig, base: Params, batch: PositionBatch, *, model_targets: bool
) -> BaseOutputs:
    """Runs the block heads on cached states of n positions.

    The model has generated the text, so both kinds of targets are the same.
    """
    del model_targets
    hidden = jnp.asarray(batch.states).astype(model.trunk.dtype)
    states = BlockwiseLM(model).apply({"params": base}, hidden, method="head_states")
    tokens, valid = jnp.asarray(batch.tokens), jnp.asarray(batch.valid)
    return BaseOutputs(states[:, 1:], tokens, tokens[:, 1:], valid[:, 1:])


ROWS, POSITIONS = 16, 2048


class RefinerData(NamedTuple):
    """Batches, and the function that runs the frozen model on one of them.

    Attributes:
      train: returns endless batches, beginning at the given step.
      freeze: `(model, base, batch, model_targets) → BaseOutputs`: `outputs_of_rows`
        or `outputs_of_states`.
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
        f"in {states}; train the model or its heads here first, or name a folder in "
        "RefinerTrainConfig.data."
    )


def open_source(
    data: str | os.PathLike[str],
    config: RefinerTrainConfig,
    model: BlockwiseConfig,
    base: Params,
) -> RefinerData:
    """Opens a folder of packed rows or of cached states."""
    folder = as_path(data)
    if (folder / STATES_HEADER).exists():
        return _states(folder, config, model, base)
    train, validation = (
        _open_rows(folder / split, model) for split in ("train", "validation")
    )
    size = config.batch_size or ROWS

    def batches(step: int) -> RowIterator:
        rows = RowIterator(train, size, config.seed)
        rows.restore(rows.state() | {"given": step * size})
        return rows

    held_out = held_out_rows(validation, size, config.held_out_rows)
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
    config: RefinerTrainConfig,
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
        config.seed,
    )
    if not len(train) or not len(held_out_positions):
        raise UserError(f"{folder} has too few texts to train on and to hold out.")
    size, block = config.batch_size or POSITIONS, model.block_size
    batcher = PositionBatcher(states, size, block)
    held_out = batcher.held_out(held_out_positions)

    def batches(step: int) -> Iterator[PositionBatch]:
        return batcher.batches(train, config.seed, step)

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
