"""The plan of a training of heads or a block drafter, and its description."""

import dataclasses
import hashlib
import json

import numpy as np

from bpd_jax.base.errors import UserError, warn
from bpd_jax.base.typing import Params
from bpd_jax.data.generations import Generations, open_generations
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.training import frozen
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.heads.positions import (
    Positions,
    draft_vocabulary,
    positions_of,
    split_texts,
)
from bpd_jax.training.heads.states_files import cache_bytes

# Fewer held-out positions are too few for accuracies to a percent.
_FEW = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The data and the length of a training run.

    Attributes:
      train: indices of the training positions.
      held_out: indices of the held-out positions.
      counts: `[V]` frequencies of the tokens after the training positions.
      vocabulary: ids of the draft vocabulary; None for all tokens.
    """

    texts: Generations
    positions: Positions
    train: np.ndarray
    held_out: np.ndarray
    counts: np.ndarray
    vocabulary: np.ndarray | None
    steps: int
    base: str


def make_plan(config: HeadsTrainConfig, model: BlockwiseConfig, params: Params) -> Plan:
    """Opens the texts, splits them and selects the draft vocabulary."""
    texts = open_generations(config.data)
    if texts.vocab_size != model.trunk.vocab_size:
        raise UserError(
            f"{config.data} has a vocabulary of {texts.vocab_size} tokens and "
            f"{config.model} has {model.trunk.vocab_size}: generate texts with "
            f"{config.model}."
        )
    positions = positions_of(texts, config.include_prompts)
    train, held_out = split_texts(
        positions,
        config.held_out,
        config.held_out_positions,
        config.seed,
        config.train_texts,
    )
    if not len(train) or not len(held_out):
        raise UserError(
            f"{config.data} has {len(texts)} texts, which is too few for training and "
            "held-out texts: generate more."
        )
    written = texts.tokens[positions.places[train] + 1]
    counts = np.bincount(written, minlength=texts.vocab_size)
    if isinstance(config.heads, BlockHeadsConfig):
        dataclasses.replace(model, heads=config.heads)
    if config.soft_targets and model.trunk.logit_softcap is not None:
        raise UserError(
            "HeadsTrainConfig.soft_targets needs the model's own distribution, but the "
            "logits of this model are bounded (TransformerConfig.logit_softcap), which "
            "is not supported: leave soft_targets out."
        )
    if len(held_out) < _FEW:
        warn(
            f"only {len(held_out):,} positions of {config.data} are held out, on which "
            "accuracies are uncertain: raise HeadsTrainConfig.held_out, or generate "
            "more texts."
        )
    size, vocabulary = config.heads.draft_vocabulary, None
    if size is not None:
        vocabulary = draft_vocabulary(counts, size)
    return Plan(
        texts=texts,
        positions=positions,
        train=train,
        held_out=held_out,
        counts=counts,
        vocabulary=vocabulary,
        steps=config.steps_for(len(train)),
        base=fingerprint(model, params),
    )


def describe(
    config: HeadsTrainConfig, model: BlockwiseConfig, plan: Plan, trained: Params
) -> str:
    """Model, data and length of a run, and the trained parameters or their shapes."""
    trunk = model.trunk
    stored = len(plan.positions)
    if config.mode == "ring":
        stored = min(stored, config.ring_positions)
    width = trunk.d_model * (1 + len(config.heads.feature_layers))
    if isinstance(config.heads, BlockDrafterConfig):
        layers = ", ".join(map(str, config.heads.feature_layers))
        title = (
            f"block drafter (layers: {config.heads.num_layers}) that reads layers "
            f"{layers}, {config.levels} predicted tokens"
        )
        # The states of prompts too, but not those of the last token of each text.
        stored = len(plan.texts.tokens) - len(plan.texts)
    else:
        title = f"heads: {config.levels} of kind {config.heads.kind} to train"
    size = cache_bytes(stored, width) / 1e6
    where = "in memory" if config.mode == "ring" else "on disk"
    lines = [
        f"base: {config.model} ({plan.base}), width {trunk.d_model}, "
        f"{trunk.vocab_size:,} tokens",
        *frozen.describe(title, trained),
        f"data: {len(plan.texts):,} texts, {len(plan.train):,} training positions, "
        f"{len(plan.held_out):,} held-out positions",
        f"states: {stored:,} of width {width} in {config.states_dtype}, "
        f"{size:,.0f} MB {where}",
        f"run: {plan.steps:,} steps of {config.batch_size:,} positions",
    ]
    if plan.texts.base != plan.base:
        lines.append(
            f"note: the texts were generated by another model ({plan.texts.base})"
        )
    if plan.vocabulary is not None:
        share = plan.counts[plan.vocabulary].sum() / plan.counts.sum()
        lines.append(
            f"draft vocabulary: {len(plan.vocabulary):,} tokens, {share:.2%} of the "
            "generated text"
        )
    return "\n".join(lines)


def identity(config: HeadsTrainConfig, plan: Plan) -> str:
    """A hash of everything that determines the result of a run."""
    fields = dataclasses.asdict(config)
    for name in ("model", "data", "states", "log_every", "evaluate_every"):
        del fields[name]
    for name in ("checkpoint_every", "held_out_positions", "heads_dtype", "mesh"):
        del fields[name]
    if fields["start"] is None:
        del fields["start"]  # Earlier versions did not have it.
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    digest.update(f"{plan.base} {plan.steps}".encode())
    for array in (plan.texts.tokens, plan.texts.offsets, plan.texts.prompt_lengths):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
