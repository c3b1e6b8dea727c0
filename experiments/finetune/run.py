"""Pretrains a tiny blockwise model, finetunes it on tasks, and evaluates both.

    python -m experiments.finetune.run --data=FOLDER

FOLDER contains JSON Lines with the field names of TensorFlow Datasets: `c4/*.jsonl.gz`
and, for each task, `TASK/train.jsonl.gz` and `TASK/validation.jsonl.gz`. The same
command resumes an interrupted run; `--gin.NAME=VALUE` applies to all runs. For the
pretrained and the finetuned model it reports the loss and perplexity of the targets and
the accuracy of each head, on held-out rows that were not used to select the checkpoint;
and, on prompts from all held-out examples, block efficiency and the quality of the
decoded texts: exact match and F1 of SQuAD's answers, ROUGE of summaries.
"""

import dataclasses
import math
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from absl import flags

from bpd_jax.base import cli, configuration, progress, provenance
from bpd_jax.base.configuration import Parsed
from bpd_jax.base.errors import UserError
from bpd_jax.data import text_readers
from bpd_jax.data.example_readers import example_files
from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.rows import PackedRows, open_rows
from bpd_jax.decoding.asset_files import with_assets
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.decoding.loading import load_model
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.run_loading import held_out_prompts
from bpd_jax.evaluation.efficiency import block_efficiency, bootstrap_interval
from bpd_jax.evaluation.metrics import SCORE_LABELS, estimate, metric_of
from bpd_jax.models.mesh import make_mesh
from bpd_jax.models.parameters import count_parameters
from bpd_jax.storage import files
from bpd_jax.studies.tasks import plain_text
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.state import abstract_state, make_optimizer
from bpd_jax.training.validation import Evaluator

DATA = cli.DEFINE_path("data", None, "Folder of JSON Lines.")
OUTPUT = cli.DEFINE_path(
    "output", "benchmarks/results/finetune_cpu.json", "JSON file of the results."
)

_HERE = "experiments/finetune"
_TASKS, _RUNS = ("squad", "samsum"), pathlib.Path("runs/finetune")
# Held-out rows for the losses; examples to decode, and new tokens of each.
_ROWS, _PROMPTS, _NEW_TOKENS = 200, 32, 48


def main() -> None:
    """Trains and evaluates the models; prints and writes the results."""
    if flags.FLAGS.gin_file:
        raise UserError(
            "--gin_file is not used here: the runs have gin files of their own, whose "
            "settings --gin.NAME=VALUE overrides."
        )
    data = cli.required("data")
    files.check_writable(OUTPUT.value)
    base = _RUNS / "base"
    pretrained = _train(
        [f"{_HERE}/pretrain.gin"], [_files(f"{data}/c4/*.jsonl.gz")], base
    ).value
    result: dict[str, Any] = {
        "command": " ".join(
            [
                "python -m experiments.finetune.run --data=FOLDER",
                # Without local paths.
                *(
                    "--gin." + re.sub(r"""(['"])/.*?\1""", r"\1PATH\1", binding)
                    for binding in flags.FLAGS.gin_bindings
                ),
            ]
        ),
        "description": (
            "Losses and accuracies are of held-out rows that were not used to select "
            "the checkpoint, prompts from all held-out examples. Scores are of the "
            "texts decoded from those prompts, in percent, against all references."
        ),
        "date": provenance.today(),
        "device": provenance.device(),
        "versions": provenance.versions(),
        "parameters": count_parameters(pretrained.model)["total"],
        "pretraining": {
            "steps": pretrained.steps,
            "tokens_per_step": pretrained.tokens_per_step,
        },
        "tasks": {},
    }
    for task in _TASKS:
        parsed = _train(
            [f"{_HERE}/finetune.gin", f"gin_configs/tasks/{task}.gin"],
            [
                f"START = {str(base)!r}",
                _files(f"{data}/{task}/{{split}}.jsonl.gz"),
                # Some of its rows select the checkpoint, the others are evaluated.
                "ExampleTask.validation_from = 'validation'",
            ],
            _RUNS / task,
        )
        figures = _compare(parsed.value, base, _RUNS / task)
        result["tasks"][task] = figures
        _print(task, figures)
    files.write_json(OUTPUT.value, result)
    print(f"written to {OUTPUT.value}")


def _files(pattern: str) -> str:
    return f"ExampleTask.files = {pattern!r}"


def _train(
    gin_files: Sequence[str], bindings: Sequence[str], workdir: pathlib.Path
) -> Parsed[TrainConfig]:
    """Trains in a separate process, which gets all `--gin.NAME=VALUE` flags."""
    bindings = [*bindings, *flags.FLAGS.gin_bindings]
    words = [sys.executable, "-m", "bpd_jax.train", f"--workdir={workdir}"]
    words += [f"--gin_file={file}" for file in gin_files]
    words += [f"--gin_bindings={binding}" for binding in bindings]
    progress.say(f"# {workdir.name}\n{shlex.join(words)}")
    status = subprocess.run(words, check=False).returncode
    if status:
        raise UserError(f"training {workdir} ended with status {status}; see above.")
    return configuration.parse(gin_files, bindings, TrainConfig)


def _compare(
    config: TrainConfig, base: pathlib.Path, run_folder: pathlib.Path
) -> dict[str, Any]:
    """Metrics of both models on held-out examples."""
    mesh = make_mesh(config.mesh)
    optimizer = make_optimizer(config.optimizer, config.steps)
    abstract = abstract_state(config.model, optimizer, mesh, config.compute)
    rows = open_rows(run_folder / "data" / "validation")
    # The first rows selected the checkpoint.
    selecting = config.evaluate_batches
    chose = len(rows) if selecting is None else config.batch_size * selecting
    rows = _rows_from(rows, chose)
    batches = min(_ROWS, len(rows)) // config.batch_size
    if not batches:
        raise UserError(
            f"{run_folder}: no held-out rows are left after the {chose} that select "
            "the checkpoint; give more records, or reduce TrainConfig.evaluate_batches."
        )
    wider = dataclasses.replace(config, evaluate_batches=batches)
    evaluate = Evaluator(wider, rows, abstract, mesh)
    after, before = load_model(str(run_folder)), load_model(str(base))
    longest = config.length - _NEW_TOKENS - config.model.block_size
    assert isinstance(after.task, ExampleTask)
    prompts = held_out_prompts(after.task, _PROMPTS, longest, after.tokenizer)
    answers = _answers(after.task, {prompt.document for prompt in prompts})
    references = [answers[prompt.document] for prompt in prompts]
    figures: dict[str, Any] = {
        "steps": config.steps,
        "tokens_per_step": config.tokens_per_step,
        "rows_that_chose": chose,
        "rows_measured": batches * config.batch_size,
        "prompts": len(prompts),
        "max_new_tokens": _NEW_TOKENS,
    }
    for name, loaded in (("before", before), ("after", after)):
        generations = _decode(loaded, [prompt.tokens for prompt in prompts])
        figures[name] = {
            **_targets(evaluate(loaded.params)),
            "block_efficiency": block_efficiency(generations),
            "block_efficiency_interval": list(bootstrap_interval(generations)),
            **_quality(after.task.name, loaded, generations, references),
        }
    return figures


def _rows_from(rows: PackedRows, first: int) -> PackedRows:
    """The rows from `first` on."""
    mask = None if rows.loss_mask is None else rows.loss_mask[first:]
    return dataclasses.replace(
        rows,
        tokens=rows.tokens[first:],
        segment_ids=rows.segment_ids[first:],
        loss_mask=mask,
    )


def _targets(row: dict[str, float]) -> dict[str, Any]:
    """Loss, perplexity and accuracies of an evaluation."""

    def heads(kind: str) -> list[float]:
        name = f"validation_{kind}_head_"
        return [value for column, value in row.items() if column.startswith(name)]

    losses = heads("loss")
    return {
        "loss": losses,
        "perplexity": math.exp(losses[0]),
        "accuracy": heads("accuracy"),
    }


def _answers(task: ExampleTask, ids: Collection[str]) -> dict[str, list[str]]:
    """The references of held-out examples, by ID."""
    target = task.dataset.target
    return {
        example: texts[target]
        for name, path in example_files(task, "validation")
        for number, texts in text_readers.read_json_fields(path, [target], target)
        if (example := f"{name}:{number}") in ids
    }


def _decode(loaded: LanguageModel, prompts: Sequence[np.ndarray]) -> list[Generation]:
    """Decodes prompts by plain blockwise parallel decoding."""
    # `bpd_jax.load` would discard the layout that the evaluation of losses requires.
    decoder = with_assets(loaded.for_decoding()).decoder()
    options = DecodeOptions(
        max_new_tokens=_NEW_TOKENS,
        end_of_text=loaded.end_of_text,
        batch_size=8,
    )
    return decoder.decode(parse_method("bpd"), prompts, options)


def _quality(
    task: str,
    loaded: LanguageModel,
    generations: Sequence[Generation],
    references: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """Mean scores of the texts in percent; empty if the task has no metric."""
    metric = metric_of(task)
    if metric is None:
        return {}
    scores = [
        metric(plain_text(loaded, text.output_ids), right)
        for text, right in zip(generations, references, strict=True)
    ]
    means = {name: estimate(name, scores) for name in scores[0]}
    return {
        "scores": {name: mean.value for name, mean in means.items() if mean},
        "score_intervals": {
            name: mean.interval for name, mean in means.items() if mean
        },
    }


def _print(task: str, figures: dict[str, Any]) -> None:
    for name in ("before", "after"):
        row = figures[name]
        right = " ".join(f"{100 * share:5.1f}" for share in row["accuracy"])
        print(
            f"{task:<14}{name:<7} perplexity of targets {row['perplexity']:9.2f}, "
            f"heads right {right} %, {row['block_efficiency']:.2f} tokens a call"
            + "".join(
                f", {SCORE_LABELS[score]} {value:.1f} %"
                for score, value in row.get("scores", {}).items()
            ),
            flush=True,
        )


if __name__ == "__main__":
    cli.run(main)
