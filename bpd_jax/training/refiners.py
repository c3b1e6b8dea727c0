"""Training of a refiner for a frozen model.

`refiner_sources` provides the data. The run is in the folder `OUTPUT.training` until it
ends, so that a stopped run can resume. The refiner's folder is written at the end,
atomically.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.typing import Array, Float, Params
from bpd_jax.models.attachment_files import REFINER_KIND, save_refiner
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.blockwise import BlockwiseLM
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.trained_refiners import (
    HydraConfig,
    RecurrentConfig,
    RefinerConfig,
    hydra_states,
    markov_queries,
    recurrent_queries,
    recurrent_start,
    recurrent_step,
)
from bpd_jax.storage import files, folders
from bpd_jax.storage.paths import as_path, local_copy
from bpd_jax.training import (
    frozen,
    metrics,
    run_folder,
)
from bpd_jax.training.config import FrozenConfig, OptimizerConfig
from bpd_jax.training.frozen import Batches
from bpd_jax.training.levels_loss import draft_targets
from bpd_jax.training.objective import Levels, LevelSums, Objective
from bpd_jax.training.refiner_sources import BaseOutputs, RefinerSettings, open_source
from bpd_jax.training.run_names import CHECKPOINTS
from bpd_jax.training.validation import per_head

_WARMUP = 0.05

_SETTINGS = "settings.json"  # the first file of a run
_RUN = folders.FolderKind(
    "an unfinished training of a refiner",
    _SETTINGS,
    (
        CHECKPOINTS,
        metrics.FILE_NAME,
        metrics.TENSORBOARD,
    ),
)


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

    def table(self) -> dict[str, list[float]]:
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
        for name, values in self.table().items():
            row |= per_head(f"{prefix}_{name}", values, 2)
        return row


@dataclasses.dataclass(frozen=True)
class RefinerObjective(Objective):
    """The frozen arrays are the model's parameters.

    Attributes:
      freeze: runs the frozen model on a batch; see `refiner_sources.RefinerData`.
      model_targets: whether the targets are the model's own next tokens.
    """

    config: RefinerConfig
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
        config, tokens = self.config, outputs.tokens
        if isinstance(config, HydraConfig):
            model = BlockwiseLM(self.model)
            embedded = model.apply({"params": base}, tokens, method="embed")
            # Each position of the batch is treated as one text with a single path.
            states = [
                hydra_states(config, params, outputs.hidden, embedded[:, None, :j], j)
                for j in config.levels
            ]
            return jnp.concatenate(states, axis=1), matrix
        queries = []
        if isinstance(config, RecurrentConfig):
            state = recurrent_start(params, outputs.hidden)
            for level in config.levels:
                state = recurrent_step(params, state, tokens[:, level - 1])
                queries.append(recurrent_queries(params, state, level))
        else:
            queries = [
                markov_queries(params, tokens[:, level - 1], level)
                for level in config.levels
            ]
        vocabulary = base.get("heads", {}).get("vocabulary")
        output = params["output"]
        output = output if vocabulary is None else output[vocabulary]
        shape = len(matrix), *output.shape
        output = jnp.broadcast_to(output.astype(matrix.dtype), shape)
        inputs = jnp.concatenate([outputs.states, jnp.stack(queries, axis=1)], axis=-1)
        return inputs, jnp.concatenate([matrix, output], axis=-1)


def train_refiner(
    settings: RefinerSettings,
    model: BlockwiseConfig,
    base: Params,
    data: str | os.PathLike[str],
    output: str | os.PathLike[str],
    command: str = "",
) -> frozen.Result:
    """Trains a refiner, or resumes its training, and writes its folder.

    SIGTERM and Ctrl-C end the run after the current step with a checkpoint. `data` is a
    folder with the packed rows of both splits, `train` and `validation`, or with cached
    states of the model; an older refiner in `output` is replaced. `held_out` of the
    result is a `RefinerHeldOut`.
    """
    config = settings.config_for(model)
    output = as_path(output)
    folders.check_folder(output, REFINER_KIND)
    folder = output.with_name(output.name + ".training")
    folders.check_folder(folder, _RUN)
    source = open_source(data, settings, model, base)
    model_key = fingerprint(model, base)
    run_key = json.dumps([dataclasses.asdict(settings), model_key, source.key])
    objective = RefinerObjective(
        config, model, source.freeze, settings.targets == "model"
    )
    warmup = math.ceil(_WARMUP * settings.steps)
    result = frozen.train(
        objective,
        jax.jit(config.init)(jax.random.key(settings.seed)),
        base,
        lambda step: Batches(source.train(step), source.held_out, unit=source.unit),
        folder,
        FrozenConfig(
            optimizer=OptimizerConfig(settings.learning_rate, warmup),
            batch_size=source.batch_size,
            steps=settings.steps,
            seed=settings.seed,
            evaluate_every=settings.steps,
        ),
        hashlib.sha256(run_key.encode()).hexdigest(),
        ready=lambda: files.write_json(
            folder / _SETTINGS, dataclasses.asdict(settings)
        ),
        rate_name="--learning_rate",
    )
    facts = {
        "command": command,
        "settings": dataclasses.asdict(settings),
        "seconds": round(result.seconds, 1),
        "held_out": {
            name: [round(value, 5) for value in values]
            for name, values in result.held_out.table().items()
        },
        "versions": run_folder.versions(),
    }
    save_refiner(output, config, result.trained, facts, model_key)
    with files.replacing_file(output / metrics.FILE_NAME) as path:
        shutil.copyfile(local_copy(folder / metrics.FILE_NAME), path)
    folders.remove_folder(folder, _RUN)
    return result
