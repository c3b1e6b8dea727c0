"""The header of a study's results, and checks before a run resumes."""

import dataclasses
import pathlib

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.evaluation.token_cost import model_size
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.reporting.records import Facts
from bpd_jax.studies.run_files import HEADER, read_header
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.tasks import TASK_LABELS


def facts_of(context: StudyContext) -> Facts:
    """Facts about the model, the examples and the contenders."""
    config = context.config
    loaded = context.loaded(config.tasks[0])
    model = loaded.config
    trunk = model.trunk
    block_size, draft_vocabulary = _source_sizes(context)
    return {
        "size": config.size,
        "model": config.model,
        "model_sizes": _sizes(context),
        "trunk": f"{trunk.num_layers} layers, {trunk.d_model} / {trunk.d_ff} wide",
        "heads": block_size,  # L of the source, heads or block drafter
        "vocabulary": trunk.vocab_size,
        "draft_vocabulary": draft_vocabulary,
        # Earlier runs, which lack it, have that of head 1 over the whole vocabulary.
        "entropy_vocabulary": model.draft_vocab_size,
        "examples": {
            task: {
                part: sum(example.part == part for example in context.whole_draw(task))
                for part in ("report", "tune")
            }
            for task in config.tasks
        },
        "settings": config.settings,
        "assets": {name: dict(models) for name, models in config.assets.items()},
        "tasks": {task: TASK_LABELS[task] for task in config.tasks},
        "labels": {name: context.label(name) for name in config.contenders},
        "alphas": {
            name: {task: context.alphas[name][task] for task in config.tasks}
            for name in context.alphas
        },
        "zero_wins": context.zero_wins,
        "tuned": context.tuned,
        "printed": dict(config.printed),
        "notes": list(config.notes),
        "texts": {
            task: context.digest(task, context.whole_draw(task))
            for task in config.tasks
        },
        "made_with": {name: context.made_with(name) for name in config.contenders},
    }


def _source_sizes(context: StudyContext) -> tuple[int, int]:
    """L of the source that drafts, and the number of tokens that it chooses from."""
    config = context.config
    decoder, _ = context.contender(GREEDY.name, config.tasks[0])
    model, drafter = decoder.model.config, decoder.assets.drafter
    if config.source == "block" and drafter is not None:
        block = drafter.functions.config
        return block.block_size, block.draft_vocabulary or model.trunk.vocab_size
    return decoder.model.block_size, model.draft_vocab_size


def merge_facts(before: Facts, now: Facts) -> Facts:
    """The facts of a run, and the earlier facts of contenders that it leaves out.

    The records of such contenders remain, and must not be mixed with records of other
    models.
    """
    merged = {
        name: {**now[name], **{k: v for k, v in old.items() if k not in now[name]}}
        for name in ("labels", "made_with", "tuned")
        if isinstance(old := before.get(name), dict)
    }
    return {**now, **merged}


_REMEDY = "choose another --workdir, or remove this folder"


def check_settings(folder: pathlib.Path, context: StudyContext) -> Facts:
    """Returns the facts in the folder; {} if it is new."""
    if not (folder / HEADER).is_file():
        return {}
    before = read_header(folder)
    settings = context.config.settings
    for name, value in context.config.differing(before.get("settings", {})).items():
        raise UserError(
            f"{folder} contains results with {name} = {value!r}, not "
            f"{settings[name]!r}: {_REMEDY}."
        )
    return before


def check_header(folder: pathlib.Path, context: StudyContext) -> Facts:
    """Like `check_settings`, but also compares the digests of texts and models."""
    before = check_settings(folder, context)
    for task, digest in before.get("texts", {}).items():
        if task not in context.config.tasks:
            continue
        if context.digest(task, context.whole_draw(task)) != digest:
            raise UserError(
                f"{folder} contains results of other texts of {task}: the model, its "
                f"heads or the data have changed; {_REMEDY}."
            )
    for name, digest in before.get("made_with", {}).items():
        if name in context.config.contenders and context.made_with(name) != digest:
            raise UserError(
                f"{folder} contains results of {name} with other models or weights α "
                f"than the present ones: {_REMEDY}."
            )
    return before


def _sizes(context: StudyContext) -> Facts:
    """Sizes of the models, for the cost model of Table 11."""
    task = context.config.tasks[0]
    rescorers, ngrams = {}, {}
    for contender in context.config.parsed:
        assets = context.contender(contender.name, task)[0].assets
        if assets.rescorer is not None:
            rescorers[contender.assets or ""] = _size(assets.rescorer.config)
        if assets.ngram is not None:
            ngrams[contender.assets or ""] = sum(assets.ngram.sizes)
    model = _size(context.loaded(task).config)
    return {"model": model, "rescorers": rescorers, "ngrams": ngrams}


def _size(config: BlockwiseConfig) -> Facts:
    return dataclasses.asdict(model_size(config))
