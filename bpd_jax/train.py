"""Trains a blockwise language model; the same command resumes an interrupted run.

    python -m bpd_jax.train --gin_file=experiments/demo/demo.gin --workdir=runs/demo
    python -m bpd_jax.train --gin_file=experiments/demo/demo.gin --workdir=runs/demo \\
        --gin.STEPS=50 --dry_run
    python -m bpd_jax.train --gin_file=gin_configs/runs/pretrain.gin --dry_run \\
        --gin_file=gin_configs/meshes/v4_128.gin --topology=v4:4x4x4

With a gin file for HeadsTrainConfig it trains block heads or a block drafter for a
frozen model, on texts that the model generated:

    python -m bpd_jax.train --gin_file=gin_configs/runs/heads.gin \\
        --workdir=runs/heads --gin.MODEL="'runs/base'" --gin.DATA="'runs/texts'"

With TrainConfig.start the run is initialised from a trained model: from its trunk, and
from its heads if their sizes match (gin_configs/runs/finetune.gin, joint.gin).

Several processes train one model together if SLURM's `srun` started them, with
--distributed on every worker of a TPU slice, and elsewhere with these flags:

    python -m bpd_jax.train … --coordinator_address=HOST:PORT --num_processes=2 \\
        --process_id=0
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
from absl import flags

from bpd_jax.base import cli, configuration
from bpd_jax.base.chips import device_count
from bpd_jax.base.configuration import Parsed
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params
from bpd_jax.data.corpora import matched_files
from bpd_jax.data.example_readers import example_files
from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.text_task import TextTask
from bpd_jax.decoding.loading import KNOWN_RUNS, PACKAGED, load_model
from bpd_jax.models import cpu
from bpd_jax.models.partitioning import make_mesh
from bpd_jax.training import hosts, process_flags, run_description, trainer
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.heads import train_heads as heads
from bpd_jax.training.heads.heads_config import HeadsTrainConfig

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the configuration and all shapes without training."
)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "With --dry_run: the TPU slice or GPUs that will train, as v4:4x4x4 or h100:8.",
)


def main() -> None:
    """Trains a model, or heads or a block drafter for a frozen model."""
    if _TOPOLOGY.value:
        if not _DRY_RUN.value:
            raise UserError("--topology is for --dry_run: a run uses its own devices.")
        # CPU devices in place of those of the slice: only shapes are computed.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", device_count(_TOPOLOGY.value))
    cpu.keep_freed_memory()
    process_flags.join()
    with hosts.together():
        _train()


def _train() -> None:
    parsed: Parsed[Any] = configuration.parse_flags(TrainConfig, HeadsTrainConfig)
    if isinstance(parsed.value, HeadsTrainConfig):
        _train_heads(parsed)
        return
    config = parsed.value
    if _DRY_RUN.value:
        mesh = make_mesh(config.mesh)
        config.check_mesh(mesh)
        print(
            parsed.describe(),
            parsed.operative,
            run_description.describe_model(config.model),
            sep="\n\n",
        )
        print(run_description.describe_shapes(config, mesh))
        for sentence in _missing(config):
            print(f"missing here: {sentence}")
        return
    start = None
    if config.start is not None:
        start = functools.partial(_start, config, config.start)
    trainer.train(config, cli.required("workdir"), parsed.text, parsed.operative, start)


def _missing(config: TrainConfig) -> list[str]:
    """Texts and the model to start from that a run here would not find."""
    missing, task = [], config.task
    try:
        if isinstance(task, ExampleTask) and task.files is not None:
            example_files(task, "train")
        elif isinstance(task, TextTask) and task.corpus == "text_files":
            matched_files(task.text_files or "", "text_files")
    except UserError as error:
        missing.append(str(error))
    start = config.start or ""
    known = start in ("", *KNOWN_RUNS, *PACKAGED) or start.startswith("gs://")
    if not known and not pathlib.Path(start).exists():
        missing.append(f"TrainConfig.start = {start!r} is not a file or folder.")
    return missing


def _start(config: TrainConfig, start: str) -> Params:
    """The initial parameters of a run: a trunk, and heads or drafter if they match."""
    loaded = load_model(start)
    if config.task.trained_size is not None and loaded.task != config.task:
        raise UserError(
            f"the vocabulary {config.task.vocabulary} is trained on the task's text, "
            f"but {start} has another one: give the folder {start} as the vocabulary."
        )
    loaded_config = loaded.config
    trunk = dataclasses.asdict(loaded_config.trunk)
    free = ["dtype", "param_dtype"]
    if loaded_config.trunk.rotary is not None:  # No parameter depends on the length.
        free.append("max_length")
    for name, value in dataclasses.asdict(config.model.trunk).items():
        if name not in free and value != trunk[name]:
            raise UserError(
                f"TransformerConfig.{name} is {value!r}, but {trunk[name]!r} in "
                f"{start}: give the sizes of that model."
            )
    parts = ["trunk"]
    for part, title in (("heads", "block heads"), ("drafter", "block drafter")):
        trained, existing = getattr(config.model, part), getattr(loaded_config, part)
        if trained is None:
            continue
        if trained == existing:
            parts.append(part)
            hosts.print_once(f"start: trunk and {title} of {start}")
        else:
            reason = "it has none" if existing is None else "the sizes differ"
            hosts.print_once(f"start: trunk of {start}, with new {title} ({reason})")
    if config.model.heads is None and config.model.drafter is None:
        hosts.print_once(f"start: trunk of {start}")
    return {part: loaded.params[part] for part in parts}


def _train_heads(parsed: Parsed[HeadsTrainConfig]) -> None:
    loaded = load_model(parsed.value.model)
    config, model, params = parsed.value, loaded.config, loaded.params
    if _DRY_RUN.value:
        print(parsed.describe(), parsed.operative, sep="\n\n", end="\n\n")
        print(heads.preview(config, model, params))
        return
    workdir = cli.required("workdir")
    heads.train_heads(config, model, params, workdir, parsed.text, parsed.operative)


if __name__ == "__main__":
    cli.run(main)
