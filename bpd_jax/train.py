"""Trains a blockwise language model; the same command resumes an interrupted run.

    python -m bpd_jax.train --gin_file=experiments/demo/demo.gin --workdir=runs/demo
    python -m bpd_jax.train --gin_file=experiments/demo/demo.gin --workdir=runs/demo \\
        --gin.STEPS=50 --dry_run
    python -m bpd_jax.train --gin_file=gin_configs/runs/pretrain.gin --dry_run \\
        --gin_file=gin_configs/meshes/v4_128.gin --topology=v4:4x4x4

With a gin file for HeadsTrainConfig it trains block heads or a block drafter for a
frozen model, on texts that the model generated; with one for RefinerTrainConfig a
refiner, a small module that conditions the heads on the preceding draft:

    python -m bpd_jax.train --gin_file=gin_configs/runs/heads.gin \\
        --workdir=runs/heads --gin.MODEL="'runs/base'" --gin.DATA="'runs/texts'"
    python -m bpd_jax.train --gin_file=gin_configs/runs/refiner.gin \\
        --workdir=runs/base/refiners/markov --gin.MODEL="'runs/base'"

With TrainConfig.start the run is initialised from a trained model: from its trunk, and
from its heads if their sizes match (gin_configs/runs/finetune.gin, joint.gin).

Several processes train one model together if SLURM's `srun` started them, with
--distributed on every worker of a TPU slice, and elsewhere with these flags:

    python -m bpd_jax.train … --coordinator_address=HOST:PORT --num_processes=2 \\
        --process_id=0
"""

import functools
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh

from bpd_jax.base import cli, configuration
from bpd_jax.base.chips import device_count
from bpd_jax.base.configuration import Parsed
from bpd_jax.base.errors import UserError
from bpd_jax.base.host_memory import keep_freed_memory
from bpd_jax.data.corpora import matched_files
from bpd_jax.data.example_readers import check_source
from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.generations import read_header
from bpd_jax.decoding.initial_parameters import initial_parameters
from bpd_jax.decoding.loading import KNOWN_RUNS, PACKAGED, load_model
from bpd_jax.models.mesh import make_mesh
from bpd_jax.storage.paths import as_path, in_bucket
from bpd_jax.training import (
    hosts,
    process_flags,
    refiners,
    run_description,
    trainer,
)
from bpd_jax.training.config import FrozenConfig, TrainConfig
from bpd_jax.training.heads import train_heads as heads
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.refiner_sources import RefinerTrainConfig, default_data

_WORKDIR = cli.DEFINE_path("workdir", None, "Folder of the run.")
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the configuration and all shapes without training."
)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "With --dry_run: the TPU slice or GPUs that will train, as v4:4x4x4 or h100:8.",
)


def main() -> None:
    """Trains a model, or heads, a block drafter or a refiner for a frozen model."""
    if _TOPOLOGY.value:
        if not _DRY_RUN.value:
            raise UserError("--topology is for --dry_run: a run uses its own devices.")
        # CPU devices in place of those of the slice: only shapes are computed.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", device_count(_TOPOLOGY.value))
    keep_freed_memory()
    process_flags.join()
    with hosts.together():
        _train()


def _train() -> None:
    parsed: Parsed[Any] = configuration.parse_flags(
        TrainConfig, HeadsTrainConfig, RefinerTrainConfig
    )
    if isinstance(parsed.value, FrozenConfig):
        if _DRY_RUN.value:
            print(parsed.describe(), parsed.operative, sep="\n\n", end="\n\n")
        if isinstance(parsed.value, HeadsTrainConfig):
            _train_heads(parsed)
        else:
            _train_refiner(parsed)
        return
    config = parsed.value
    if _DRY_RUN.value:
        mesh = make_mesh(config.mesh)
        config.check_mesh(mesh)
        about = run_description.describe_model(config.model)
        print(parsed.describe(), parsed.operative, about, sep="\n\n")
        print(run_description.describe_shapes(config, mesh))
        _print_missing(_missing(config))
        return
    start = None
    if config.start is not None:
        start = functools.partial(initial_parameters, config, config.start)
    trainer.train(config, cli.required("workdir"), parsed.text, parsed.operative, start)


def _missing(config: TrainConfig) -> list[str]:
    """Texts and the model to start from that a run here would not find."""
    task, start = config.task, config.start
    missing = [] if start is None else _missing_model("TrainConfig.start", start)
    try:
        if isinstance(task, ExampleTask):
            check_source(task)
        elif task.corpus == "text_files":
            matched_files(task.text_files or "", "text_files")
    except UserError as error:
        missing.append(str(error))
    return missing


def _missing_model(setting: str, name: str) -> list[str]:
    path = as_path(KNOWN_RUNS.get(name, name))
    if name in PACKAGED or in_bucket(path) or path.exists():
        return []
    return [f"{setting} = {name!r} is not a file or folder."]


def _train_heads(parsed: Parsed[HeadsTrainConfig]) -> None:
    config = parsed.value
    mesh = None if config.mesh is None else make_mesh(config.mesh)
    if _DRY_RUN.value:
        _preview_heads(config, mesh)
        return
    workdir = cli.required("workdir")
    loaded = load_model(config.model, mesh=mesh)
    heads.train_heads(
        config, loaded.config, loaded.params, workdir, parsed.text, parsed.operative
    )


def _preview_heads(config: HeadsTrainConfig, mesh: Mesh | None) -> None:
    if mesh is not None:
        config.check_mesh(mesh)
    elif _TOPOLOGY.value and jax.device_count() > 1:
        raise UserError(
            f"{_TOPOLOGY.value} has {jax.device_count()} devices, of which the run "
            "would use one: give --gin.HeadsTrainConfig.mesh=@MeshConfig()."
        )
    missing = _missing_model("HeadsTrainConfig.model", config.model)
    try:
        read_header(config.data)
    except UserError as error:
        missing.append(str(error))
    if not missing:
        loaded = load_model(config.model, mesh=mesh)
        print(heads.preview(config, loaded.config, loaded.params, mesh))
    _print_missing(missing)


def _train_refiner(parsed: Parsed[RefinerTrainConfig]) -> None:
    config = parsed.value
    if _DRY_RUN.value:
        missing = _missing_model("RefinerTrainConfig.model", config.model)
        for name, path in (("heads", config.heads), ("data", config.data)):
            if path is not None:
                missing += _missing_model(f"RefinerTrainConfig.{name}", path)
        if not missing:
            loaded = load_model(config.model, config.heads)
            print(refiners.describe(config, loaded.config))
            if config.data is None:
                try:
                    default_data(loaded.folder)
                except UserError as error:
                    missing.append(str(error))
        _print_missing(missing)
        return
    workdir = cli.required("workdir")
    loaded = load_model(config.model, config.heads)
    data = config.data or default_data(loaded.folder)
    refiners.train_refiner(
        *(config, loaded.config, loaded.params, data, workdir),
        *(parsed.text, parsed.operative),
    )


def _print_missing(sentences: list[str]) -> None:
    for sentence in sentences:
        print(f"missing here: {sentence}")


if __name__ == "__main__":
    cli.run(main)
