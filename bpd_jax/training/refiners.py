"""Training of a refiner for a frozen model.

`refiner_sources` provides the data. A run folder contains `checkpoints/`,
`metrics.jsonl`, the configuration, and at the end the refiner, in the folder `markov`.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.typing import Array, Float, Params
from bpd_jax.models.attachment_files import MARKOV, REFINER_KIND, save_refiner
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.trained_refiners import MarkovConfig, markov_queries
from bpd_jax.storage import folders
from bpd_jax.storage.paths import as_path
from bpd_jax.training import frozen, run_folder
from bpd_jax.training.frozen import Batches
from bpd_jax.training.levels_loss import draft_targets
from bpd_jax.training.objective import Levels, LevelSums, Objective
from bpd_jax.training.refiner_sources import (
    BaseOutputs,
    RefinerTrainConfig,
    open_source,
)
from bpd_jax.training.validation import per_head


class RefinerHeldOut(NamedTuple):
    """Sums over held-out positions for levels 1 … L-1, given the true earlier tokens.

    `plain` is of the block heads alone, `refined` with the refiner; `text` are the
    targets of the text, `model` the model's own next tokens, which are what greedy
    verification accepts.
    """

    plain_text: LevelSums
    refined_text: LevelSums
    plain_model: LevelSums
    refined_model: LevelSums

    def columns(self) -> dict[str, list[float]]:
        """Columns over levels 1 … L-1: top-1 accuracy and loss of each kind of sum.

        The loss is the mean over targets in the draft vocabulary; for the accuracy
        those outside are misses.
        """
        columns = {}
        for name, sums in self._asdict().items():
            accuracy = sums.correct / np.maximum(sums.valid, 1)
            columns[f"{name}_accuracy"] = accuracy.tolist()
            columns[f"{name}_loss"] = (sums.loss / np.maximum(sums.scored, 1)).tolist()
        return columns

    def metrics(self, prefix: str = "validation") -> dict[str, float]:
        row: dict[str, float] = {}
        for name, values in self.columns().items():
            row |= per_head(f"{prefix}_{name}", values, 2)
        return row

    def table(self) -> str:
        """A text table of top-1 accuracies, one line per head."""
        columns = self.columns()
        lines = ["head  text: plain  refined  model: plain  refined"]
        accuracies = zip(*(columns[f"{x}_accuracy"] for x in self._fields), strict=True)
        for head, values in enumerate(accuracies, start=2):
            cells = zip((13, 9, 14, 9), values, strict=True)
            lines.append(f"{head:4}" + "".join(f"{x:{width}.1%}" for width, x in cells))
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class RefinerObjective(Objective):
    """The frozen arrays are the model's parameters.

    Attributes:
      freeze: runs the frozen model on a batch; see `refiner_sources.RefinerData`.
      model_targets: whether the targets are the model's own next tokens.
    """

    config: MarkovConfig
    model: BlockwiseConfig
    freeze: Callable[..., BaseOutputs]
    model_targets: bool

    def levels(self, trained: Params, frozen: Params, batch: Any) -> Levels:
        """The loss is the mean over positions, then over levels."""
        return self._levels(trained, frozen, batch, self.model_targets)[1]

    def held_out_sums(
        self, trained: Params, frozen: Params, batch: Any
    ) -> RefinerHeldOut:
        """Sums of the heads with and without the refiner, for both kinds of targets."""
        sums = []
        for model_targets in (False, True):
            for levels in self._levels(trained, frozen, batch, model_targets):
                losses, ranks = levels.ranks()
                sums.append(LevelSums.of(losses, ranks == 0, levels.targets))
        return RefinerHeldOut(*sums)

    def _levels(
        self, trained: Params, frozen: Params, batch: Any, model_targets: bool
    ) -> tuple[Levels, Levels]:
        """The softmaxes without and with the refiner."""
        outputs = self.freeze(self.model, frozen, batch, model_targets=model_targets)
        vocabulary = frozen.get("heads", {}).get("vocabulary")
        vocab_size = self.model.trunk.vocab_size
        targets = draft_targets(outputs.targets, outputs.valid, vocabulary, vocab_size)
        counts = jnp.maximum(targets.scored.sum(0, dtype=jnp.float32), 1)
        weights = targets.scored / (counts * len(counts))
        plain = Levels(outputs.states, self._softmax(frozen), targets, weights)
        inputs, matrices = self._refined(trained, frozen, outputs, plain.matrices)
        columns = inputs.shape[-1] - outputs.states.shape[-1]
        return plain, plain._replace(
            inputs=inputs, matrices=matrices, trained_columns=columns
        )

    def _softmax(self, frozen: Params) -> Float[Array, "#levels draft D"]:
        """The matrices of heads 2 … L: one that they share, or one for each."""
        heads = self.model.heads
        if heads is not None and heads.has_softmax:
            matrix = frozen["heads"]["softmax"]
        else:
            matrix = softmax_rows(self.model, frozen, None)
        matrix = matrix.astype(self.model.trunk.dtype)
        return matrix if matrix.ndim == 3 else matrix[None]

    def _refined(
        self,
        params: Params,
        base: Params,
        outputs: BaseOutputs,
        matrix: Float[Array, "#levels draft D"],
    ) -> tuple[Float[Array, "n levels R"], Float[Array, "#levels draft R"]]:
        """Inputs and matrices of the refined softmax of all levels.

        A correction of the logits adds columns: [state, query] · [softmax, output]ᵀ.
        """
        queries = [
            markov_queries(params, outputs.tokens[:, level - 1], level)
            for level in self.config.levels
        ]
        vocabulary = base.get("heads", {}).get("vocabulary")
        output = params["output"]
        output = output if vocabulary is None else output[vocabulary]
        shape = len(matrix), *output.shape
        output = jnp.broadcast_to(output.astype(matrix.dtype), shape)
        inputs = jnp.concatenate([outputs.states, jnp.stack(queries, axis=1)], axis=-1)
        return inputs, jnp.concatenate([matrix, output], axis=-1)


def train_refiner(
    config: RefinerTrainConfig,
    model: BlockwiseConfig,
    params: Params,
    data: str | os.PathLike[str],
    workdir: str | os.PathLike[str],
    text: str = "",
    operative: str = "",
) -> RefinerHeldOut:
    """Trains a refiner, or resumes the run in `workdir`.

    The result is written to the folder `markov` in `workdir`. SIGTERM
    and Ctrl-C end the run after the current step with a checkpoint. `data` is a folder
    with the packed rows of both splits, `train` and `validation`, or with cached states
    of the model. `text` is the gin text of `config` and `operative` the operative one,
    for the folder. Returns the final sums over held-out positions.
    """
    refiner = config.config_for(model)
    source = open_source(data, config, model, params)
    folder = as_path(workdir)
    output = folder / MARKOV
    folders.check_folder(output, REFINER_KIND)
    objective = RefinerObjective(
        refiner, model, source.freeze, config.targets == "model"
    )
    progress.say(describe(config, model))
    # Without the folders that contain the model.
    settings = dataclasses.asdict(config)
    for name in ("model", "heads", "data"):
        del settings[name]
    base = fingerprint(model, params)
    result = frozen.train(
        objective,
        jax.jit(refiner.init)(jax.random.key(config.seed)),
        params,
        lambda step: Batches(source.train(step), source.held_out, unit=source.unit),
        folder,
        dataclasses.replace(config, batch_size=source.batch_size),
        _identity(settings, base, source.key),
        text,
        operative,
    )
    columns = result.held_out.columns().items()
    facts = {
        "settings": settings,
        "seconds": round(result.seconds, 1),
        "held_out": {name: [round(x, 5) for x in values] for name, values in columns},
        "versions": run_folder.versions(),
    }
    save_refiner(output, refiner, result.trained, facts, base)
    progress.say(
        "top-1 accuracy on held-out texts, given the true preceding tokens:\n"
        f"{result.held_out.table()}"
    )
    progress.say(f"finished: the result is in {output}")
    return result.held_out


def describe(config: RefinerTrainConfig, model: BlockwiseConfig) -> str:
    """The trained parameters and the length of a run."""
    trained = jax.eval_shape(config.config_for(model).init, jax.random.key(0))
    lines = frozen.describe("Markov refiner", trained)
    return "\n".join([*lines, f"run: {config.steps:,} steps"])


def _identity(settings: dict[str, Any], base: str, data: str) -> str:
    """A hash of everything that determines the result of a run."""
    free = ("log_every", "evaluate_every", "checkpoint_every")
    fixed = {name: value for name, value in settings.items() if name not in free}
    return hashlib.sha256(json.dumps([fixed, base, data]).encode()).hexdigest()
