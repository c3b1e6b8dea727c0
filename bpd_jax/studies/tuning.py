"""Tuning the weight α of rescorers for each task, before the measurements.

As in the paper (appendices C.2 and E), one model of each class of rescorers is
evaluated with all weights of a grid on examples that are not reported. All rescorers of
the class use the weight with the highest block efficiency on the task. The texts are
decoded once, and every weight is replayed on them. The weight 0, at which drafts are
not refined and which the paper's grid does not have, is replayed too: where it is
better than all of the grid, the results say so.

With `StudyConfig.grids`, every contender has settings of its own instead: α, the
temperature of trees and covering drafts, and the number of positions are tuned for
each search and number of drafts, one setting after the other, until none changes. The
weight that is best for one draft is not the best for many.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import fields_of
from bpd_jax.data.row_sources import WHOLE
from bpd_jax.decoding.methods import Method
from bpd_jax.evaluation.efficiency import best_alpha, block_efficiency
from bpd_jax.storage import files
from bpd_jax.studies.measure_drafts import replay
from bpd_jax.studies.study_config import class_of, parse_contender
from bpd_jax.studies.study_context import StudyContext, exact_number
from bpd_jax.studies.study_records import TUNE
from bpd_jax.training import hosts

FOLDER = "alphas"
# Upper bound of the passes over all settings of a contender.
_ROUNDS = 3


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
    if config.grids and config.tune:
        _tune_each(_unsharded(context), context)
    if "alpha" in config.grids:
        return
    needed = {
        class_of(c.method) for c in config.parsed if c.method.setting("alpha") is None
    }
    tuners = {kind: t for kind, t in config.tuners.items() if kind in needed}
    if not tuners or not config.tune:
        return
    unsharded = _unsharded(context)
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


def _unsharded(context: StudyContext) -> StudyContext:
    """A context with all tuning examples."""
    if context.shard == WHOLE:
        return context
    tuning_config = dataclasses.replace(context.config, examples=1)
    return StudyContext(tuning_config, context.workdir / "tuning")


def _tune_each(unsharded: StudyContext, context: StudyContext) -> None:
    """Sets `StudyContext.tuned`, and stores what was tried as `tune` does."""
    config = context.config
    tuned: dict[str, dict[str, dict[str, float]]] = {}
    folder = context.workdir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    groups = [list(config.tasks)] if config.pooled else [[t] for t in config.tasks]
    for contender in progress.bar(config.contenders, label="tuning", unit=" methods"):
        names = _tunable(parse_contender(contender).method, config.grids)
        if not names:
            continue
        tuned[contender] = {}
        for tasks in groups:
            grids = {name: [*config.grids[name]] for name in names}
            examples = [
                e for t in tasks for e in unsharded.whole_draw(t) if e.part == TUNE
            ]
            facts = [
                [unsharded.digest(task, examples) for task in tasks],
                contender,
                unsharded.made_with(contender),
                grids,
            ]
            digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
            place = "all" if config.pooled else tasks[0]
            method = re.sub(r"[^a-z0-9]+", "_", contender)
            path = folder / f"{method}-{place}-{digest[:12]}.json"
            if hosts.agree(not path.is_file()):
                result = _search_grids(unsharded, contender, tasks, grids)
                hosts.first(functools.partial(files.write_json, path, result, indent=1))
            chosen = _read_chosen(path)
            tuned[contender] |= dict.fromkeys(tasks, chosen)
    context.tuned = tuned


def _tunable(method: Method, grids: Mapping[str, Sequence[float]]) -> list[str]:
    """The settings of a method that are tuned, in the order of the grids."""
    drafts_best = not method.refiners and method.count == 1
    if method.is_oracle or drafts_best or method.source.name != "heads":
        return []
    return [
        name
        for name in grids
        if method.setting(name) is None
        and any(name in fields_of(part) for part in method.all_parts)
        # The length of a greedy path does not change its tokens.
        and not (name == "heads" and method.search_name == "greedy")
    ]


def _search_grids(
    context: StudyContext,
    contender: str,
    tasks: Sequence[str],
    grids: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Tunes one setting after the other, the others fixed, until none changes.

    It begins with weight and temperature 1 and all positions. Of equal block
    efficiencies the value nearest 1 is chosen, of positions the fewest.
    """
    chosen = {name: max(v) if name == "heads" else 1.0 for name, v in grids.items()}
    tried: dict[str, float] = {}

    def efficiency(values: Mapping[str, float]) -> float:
        text = json.dumps(values)
        if text not in tried:
            tried[text] = _efficiency(context, contender, tasks, values)
        return tried[text]

    for _ in range(_ROUNDS):
        before = dict(chosen)
        for name, values in grids.items():
            found = {v: efficiency({**chosen, name: v}) for v in values}
            best = max(found.values())
            chosen[name] = min(
                (v for v in values if found[v] == best), key=lambda v: (abs(v - 1), v)
            )
        if chosen == before:
            break
    return {
        "contender": contender,
        "tasks": [*tasks],
        "chosen": chosen,
        "block_efficiency": [[json.loads(text), e] for text, e in tried.items()],
    }


def _efficiency(
    context: StudyContext,
    contender: str,
    tasks: Sequence[str],
    values: Mapping[str, float],
) -> float:
    """Block efficiency on the tuning texts with some settings."""
    parsed = parse_contender(contender)
    method, at = parsed.method, "" if parsed.assets is None else f"@{parsed.assets}"
    for name, value in values.items():
        method = method.with_setting(name, exact_number(value))
    # A set weight is not tuned, so that the name has all settings.
    groups = replay(
        context, f"{method.name}{at}", tasks, every_position=False, parts=[TUNE]
    )
    texts = [text for _, generations in groups for text in generations]
    if not texts:
        listed = ", ".join(tasks)
        raise UserError(f"{listed} has no text to tune on: add more records.")
    return block_efficiency(texts)


def _read_chosen(path: pathlib.Path) -> dict[str, float]:
    """The chosen settings."""
    try:
        chosen = files.read_json(path)["chosen"]
        return {str(name): float(value) for name, value in chosen.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {path} ({error}): remove it.") from error


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
