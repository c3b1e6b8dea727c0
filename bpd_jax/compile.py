"""Compiles a training step and a decode step for TPUs and GPUs, without them.

    python -m bpd_jax.compile --topology=v4:4x4x4 \\
        --gin_file=gin_configs/runs/pretrain.gin \\
        --gin_file=gin_configs/meshes/v4_128.gin

The accelerator's own compiler, libtpu or XLA's for CUDA, gives the memory of a core or
GPU; the model's sizes and the chip's peak figures give a lower bound of the time. It
needs neither the accelerator nor a network: `make tpu-compile` and `make gpu-compile`
set up an environment and compile the paper's setting. docs/tpu.md explains the figures.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from absl import flags

from bpd_jax.base import cli, configuration, provenance
from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import configurable
from bpd_jax.compilation import programs
from bpd_jax.compilation.compiler import CUDA_PACKAGES, Slice, compile_for, find_slice
from bpd_jax.compilation.decode_programs import DecodeShapes, decode_programs
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.reporting.terminal import print_rows
from bpd_jax.storage.files import check_writable, write_json
from bpd_jax.storage.paths import as_path
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.heads.heads_config import HeadsTrainConfig

_PROGRAMS = ("train", "decode", "frozen")
_PACKAGES = ("jax", "jaxlib", "libtpu", *CUDA_PACKAGES, "flax", "optax")

_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "The slice: a chip and its sides, as v4:4x4x4 or v5e:4x4; or GPUs, as h100:8.",
)
_SLICES = flags.DEFINE_integer(
    "slices", 1, "Number of slices, joined by the data centre's network."
)
_PROGRAM = flags.DEFINE_list(
    "program",
    ["train"],
    "Comma-separated list of programs: train; decode, which is the pass over the "
    "prompts and the decode loop; or frozen, which is the training of heads or a block "
    "drafter (HeadsTrainConfig) for the frozen model.",
)
_RESCORER = cli.DEFINE_path(
    "rescorer", None, "gin file of the small LM of neural methods."
)
_OUTPUT = cli.DEFINE_path("output", None, "JSON file for all figures.")
_HLO = cli.DEFINE_path("hlo", None, "Folder for the text of compiled programs.")
cli.define_flags(DecodeShapes)


@configurable
@dataclasses.dataclass(frozen=True)
class Configurations:
    """What the programs are built from."""

    train: TrainConfig | None = None
    heads: HeadsTrainConfig | None = None
    model: BlockwiseConfig | None = None


def main() -> None:
    """Compiles the programs that the flags name and prints the table."""
    if not _PROGRAM.value or not set(_PROGRAM.value) <= set(_PROGRAMS):
        raise UserError(
            f"--program={','.join(_PROGRAM.value)} must be a comma-separated list of "
            f"{', '.join(_PROGRAMS)}."
        )
    texts = [as_path(_HLO.value) / f"{x}.txt" for x in _PROGRAM.value if _HLO.value]
    for file in (_OUTPUT.value, *texts):
        if file:
            check_writable(file)
    shapes = DecodeShapes(**cli.flag_values(DecodeShapes))
    accelerators = find_slice(cli.required("topology"), _SLICES.value)
    defaults = []
    if "frozen" in _PROGRAM.value:
        defaults += ["Configurations.heads = @HeadsTrainConfig()"]
        defaults += ["Configurations.model = @BlockwiseConfig()"]
    if {"train", "decode"} & {*_PROGRAM.value}:
        defaults += ["Configurations.train = @TrainConfig()"]
    configs = configuration.parse_flags(Configurations, defaults=defaults).value
    # All programs are validated before the first one is compiled.
    chosen: list[programs.Program] = []
    for name in _PROGRAM.value:
        training: Any = configs.heads if name == "frozen" else configs.train
        mesh = make_mesh(training.mesh or MeshConfig(), accelerators.devices)
        if name == "frozen":
            assert configs.model is not None
            chosen += programs.frozen_programs(training, configs.model, mesh)
        elif name == "train":
            chosen.append(programs.train_program(training, mesh))
        else:
            file, rescorer = _RESCORER.value, None
            if file is not None:
                rescorer = configuration.parse([file], [], BlockwiseConfig).value
            chosen += decode_programs(training.model, shapes, mesh, rescorer)
    compiled: dict[str, dict[str, Any]] = {}
    for program in chosen:
        print(f"compiling {program.name} for {accelerators.name} ...", file=sys.stderr)
        compiled[program.name] = compile_for(program, accelerators, _HLO.value)
    _print(accelerators, compiled)
    if _OUTPUT.value:
        about = {
            "topology": accelerators.name,
            "cores": len(accelerators.devices),
            "versions": provenance.package_versions(_PACKAGES),
        }
        write_json(_OUTPUT.value, {**about, "programs": compiled})
        print(f"written to {_OUTPUT.value}")


def _print(accelerators: Slice, compiled: dict[str, dict[str, Any]]) -> None:
    """Prints a table of all figures, with one column per program."""

    def gib(size: float) -> str:
        return f"{size / 2**30:,.2f} GiB"

    def ms(seconds: float) -> str:
        return f"{1000 * seconds:,.2f} ms"

    unit, count = "GPU" if accelerators.chip.gpu else "core", len(accelerators.devices)
    total = f"HBM: total, of {gib(accelerators.chip.usable)}"
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "program": lambda x: x["about"],
        "data × fsdp × model": lambda x: " × ".join(map(str, x["mesh"].values())),
        "HBM: arguments": lambda x: gib(x["memory_per_core"]["arguments"]),
        "HBM: temporaries": lambda x: gib(x["memory_per_core"]["temporaries"]),
        total: lambda x: gib(x["memory_per_core"]["needed"]),
        "collectives": lambda x: f"{sum(x['collectives'].values())}",
        "the model's FLOPs": lambda x: f"{x['model_flops_per_core'] / 1e12:,.4g} T",
        "parameters and cache": lambda x: gib(x["read_bytes_per_core"]),
        "minimum time": lambda x: ms(max(x["minimum_seconds"].values())),
        "… of arithmetic": lambda x: ms(x["minimum_seconds"]["compute"]),
        "… of reading": lambda x: ms(x["minimum_seconds"]["reading"]),
    }
    print_rows(
        ["", *compiled],
        [[name, *map(cell, compiled.values())] for name, cell in cells.items()],
        title=f"{accelerators.name}: {count} {unit}{'s' * (count > 1)}",
        caption=f"Per {unit}. The minimum time is a bound, not a measurement.",
        strong=[total, "minimum time"],
    )


if __name__ == "__main__":
    cli.run(main)
