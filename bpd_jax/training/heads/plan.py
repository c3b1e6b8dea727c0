"""The plan of training heads or a block drafter, printed before the work."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.data.generations import Generations, open_generations
from bpd_jax.errors import UserError
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.heads import init_heads, is_trained
from bpd_jax.training.heads.cache import cache_bytes
from bpd_jax.training.heads.positions import (
    Positions,
    draft_vocabulary,
    positions_of,
    split_texts,
)
from bpd_jax.training.heads.settings import HeadsTrainConfig
from bpd_jax.typing import Params


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a training is about to do.

    Attributes:
      texts: that the model wrote.
      positions: of all texts.
      train: positions to train at.
      held_out: positions to measure at.
      counts: `[V]` how often each token is the next one at those to train at.
      vocabulary: the draft vocabulary, if there is one.
      steps: of the whole run.
      base: fingerprint of the model.
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
    """Reads the texts and decides what to do with them.

    Raises:
      UserError: the texts are missing, too few, or of another vocabulary.
    """
    texts = open_generations(config.data)
    if texts.vocab_size != model.trunk.vocab_size:
        raise UserError(
            f"{config.data} is of a vocabulary of {texts.vocab_size} tokens and "
            f"{config.model} of {model.trunk.vocab_size}: generate texts with "
            f"{config.model} itself."
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
            f"{config.data} has {len(texts)} texts: too few to train on some and to "
            "measure on others; generate more."
        )
    written = texts.tokens[positions.places[train] + 1]
    counts = np.bincount(written, minlength=texts.vocab_size)
    _check_fits(config, model)
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


def _check_fits(config: HeadsTrainConfig, model: BlockwiseConfig) -> None:
    """Raises a `UserError` unless what is to be trained fits the model."""
    if isinstance(config.heads, BlockDrafterConfig):
        config.heads.resolve(model.trunk)
    else:
        dataclasses.replace(model, heads=config.heads)


def describe(config: HeadsTrainConfig, model: BlockwiseConfig, plan: Plan) -> str:
    """A few lines to print before the work."""
    trunk = model.trunk
    title, shapes = _shapes(config, model, plan)
    kept = len(plan.positions)
    if config.mode == "ring":
        kept = min(kept, config.ring_positions)
    width = trunk.d_model
    if isinstance(config.heads, BlockDrafterConfig):
        # The states of prompts too, but not of the last token of a text.
        kept = len(plan.texts.tokens) - len(plan.texts)
        width *= 1 + len(config.heads.feature_layers)
    size = cache_bytes(kept, width) / 1e6
    where = "in memory" if config.mode == "ring" else "on disk"
    lines = [
        f"base: {config.model} ({plan.base}), width {trunk.d_model}, "
        f"{trunk.vocab_size:,} tokens",
        title,
        *(
            f"  {name}: {x.dtype}{list(x.shape)}"
            + ("" if trained else " (not trained)")
            for name, (x, trained) in shapes.items()
        ),
        f"data: {len(plan.texts):,} texts, {len(plan.train):,} positions to train at, "
        f"{len(plan.held_out):,} held-out ones to measure at",
        f"states: {kept:,} of {width} {config.states_dtype} numbers, "
        f"{size:,.0f} MB {where}",
        f"run: {plan.steps:,} steps of {config.batch_size:,} positions",
    ]
    if plan.texts.base != plan.base:
        lines.append(
            f"note: the texts were written by another model ({plan.texts.base})"
        )
    if plan.vocabulary is not None:
        share = plan.counts[plan.vocabulary].sum() / plan.counts.sum()
        lines.append(
            f"draft vocabulary: {len(plan.vocabulary):,} tokens, {share:.2%} of what "
            "the model wrote"
        )
    return "\n".join(lines)


def _shapes(
    config: HeadsTrainConfig, model: BlockwiseConfig, plan: Plan
) -> tuple[str, dict[str, tuple[jax.ShapeDtypeStruct, bool]]]:
    """A title, and by name all parameters and whether they are trained."""
    heads = config.heads
    if isinstance(heads, BlockDrafterConfig):
        functions = DrafterFunctions(heads, model.trunk)
        tree = jax.eval_shape(functions.init, jax.random.key(0))
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        shapes = {
            "/".join(entry.key for entry in path): (leaf, True) for path, leaf in leaves
        }
        layers = ", ".join(map(str, heads.feature_layers))
        title = (
            f"block drafter: {heads.num_layers} layers that read layers {layers}, "
            f"{config.levels} guesses"
        )
    else:
        tree = jax.eval_shape(
            lambda: init_heads(
                model, _abstract_trunk(model), heads, jax.random.key(0), plan.vocabulary
            )
        )
        shapes = {name: (x, is_trained(heads, name)) for name, x in tree.items()}
        title = f"heads: {config.levels} of kind {heads.kind} to train"
    count = sum(x.size for x, trained in shapes.values() if trained)
    return f"{title}, {count:,} parameters", shapes


def identity(config: HeadsTrainConfig, plan: Plan) -> str:
    """A hash that is equal for two runs with the same result."""
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


def _abstract_trunk(model: BlockwiseConfig) -> Params:
    """The one matrix of the trunk that new heads look at."""
    trunk = model.trunk
    matrix = jnp.zeros((trunk.vocab_size, trunk.d_model))
    return {"trunk": {"embedding": matrix, "softmax": matrix}}
