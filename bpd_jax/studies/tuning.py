"""Tuning the weight α of rescorers for each task, before the measurements.

As in the paper (appendices C.2 and E), one model of each class of rescorers is
evaluated with all weights of a grid on examples that are not reported. All rescorers of
the class use the weight with the highest block efficiency on the task. The texts are
decoded once, and every weight is replayed on them. The weight 0, at which drafts are
not refined and which the paper's grid does not have, is replayed too: where it is
better than all of the grid, the results say so.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.data.row_sources import WHOLE
from bpd_jax.evaluation.efficiency import best_alpha, block_efficiency
from bpd_jax.storage import files
from bpd_jax.studies.measure_drafts import replay
from bpd_jax.studies.study_config import class_of, parse_contender
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import TUNE
from bpd_jax.training import hosts

FOLDER = "alphas"


def tune(context: StudyContext) -> None:
    """Sets the weights of a context's classes of rescorers, by task.

    Also sets the tasks on which α = 0 is better. The weights are stored in
    `WORKDIR/alphas/CLASS-TASK-DIGEST.json` with the block efficiency of each, for all
    studies that tune on the same texts with the same models.
    A class is tuned if a contender of the class does not set α, and if there are
    `tuners` and tuning examples. If the model of a tuner is missing, α is 1 for its
    class, and the reason is printed.

    Each shard needs all tuning examples and decodes them itself, unless another shard
    has already stored the result.
    """
    config = context.config
    needed = {
        class_of(c.method) for c in config.parsed if c.method.setting("alpha") is None
    }
    tuners = {kind: t for kind, t in config.tuners.items() if kind in needed}
    if not tuners or not config.tune:
        return
    unsharded = context
    if context.shard != WHOLE:
        tuning_config = dataclasses.replace(config, examples=1)
        unsharded = StudyContext(tuning_config, context.workdir / "tuning")
    folder = context.workdir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    alphas: dict[str, dict[str, float]] = {}
    zero_wins: dict[str, list[str]] = {}
    reasons = unsharded.unavailable([*tuners.values()])
    for kind, tuner in tuners.items():
        if tuner in reasons:
            print(f"α of {kind} rescorers is not tuned and stays 1: {reasons[tuner]}")
            continue
        alphas[kind], zero_wins[kind] = {}, []
        for task in progress.bar(config.tasks, label="tuning", unit=" tasks"):
            path = folder / _name(unsharded, kind, tuner, task)
            if hosts.agree(not path.is_file()):
                result = _tune_task(unsharded, tuner, task)
                hosts.first(functools.partial(files.write_json, path, result, indent=1))
            alphas[kind][task], zero = _read(path)
            if zero:
                zero_wins[kind].append(task)
    context.alphas, context.zero_wins = alphas, zero_wins


def _name(context: StudyContext, kind: str, tuner: str, task: str) -> str:
    """The file name of a result, with a digest of everything that it depends on."""
    examples = [e for e in context.whole_draw(task) if e.part == TUNE]
    facts = [
        context.digest(task, examples),
        tuner,
        context.made_with(tuner),
        [0.0, *map(float, context.config.alphas)],
        "zero_wins",
    ]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return f"{kind}-{task}-{digest[:12]}.json"


def _tune_task(context: StudyContext, tuner: str, task: str) -> dict[str, Any]:
    """Replays every weight on the tuning texts."""
    contender = parse_contender(tuner)
    suffix = "" if contender.assets is None else f"@{contender.assets}"
    efficiencies: dict[float, float] = {}
    grid = [*map(float, context.config.alphas)]
    for alpha in dict.fromkeys((0.0, *grid)):
        name = f"{contender.method.with_setting('alpha', alpha).name}{suffix}"
        groups = replay(context, name, [task], every_position=False, parts=[TUNE])
        texts = [text for _, generations in groups for text in generations]
        if not texts:
            raise UserError(f"{task} has no text to tune α on: add more records.")
        efficiencies[alpha] = block_efficiency(texts)
    best = best_alpha({alpha: efficiencies[alpha] for alpha in grid})
    return {
        "contender": tuner,
        "task": task,
        "examples": len(texts),
        "alpha": best,
        "zero_wins": efficiencies[0.0] > efficiencies[best],
        "block_efficiency": {f"{a:g}": value for a, value in efficiencies.items()},
    }


def _read(path: pathlib.Path) -> tuple[float, bool]:
    """α, and whether 0 is better."""
    try:
        result = files.read_json(path)
        return float(result["alpha"]), bool(result["zero_wins"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path} ({error}): remove it.") from error
