"""Compiles a training step and a decode step for TPUs and GPUs, without them.

    python -m bpd_jax.compile --topology=v4:4x4x4 \\
        --gin_file=gin_configs/runs/pretrain.gin \\
        --gin_file=gin_configs/meshes/v4_128.gin

The accelerator's own compiler, libtpu or XLA's for CUDA, gives the memory, FLOPs and
traffic of a core or GPU; the chip's peak figures give a lower bound for the time. It
needs neither the accelerator nor a network: `make tpu-compile` and `make gpu-compile`
set up an environment and compile the paper's setting. docs/tpu.md explains the table.

If a configuration does not fit into memory, the error message contains the compiler's
numbers.
"""

import sys

from absl import flags
from jax.sharding import Mesh

from bpd_jax import configuration
from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.compilation import compile_report
from bpd_jax.compilation.frozen_programs import frozen_programs
from bpd_jax.compilation.measured_program import Measured, compile_for
from bpd_jax.compilation.programs import (
    DecodeShapes,
    Program,
    decode_program,
    train_program,
)
from bpd_jax.compilation.topology import find_slice
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.partitioning import MeshConfig
from bpd_jax.storage.buckets import as_path
from bpd_jax.storage.files import check_writable, write_json
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.slices import make_mesh

_PROGRAMS = ("train", "decode", "frozen")

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
    "Comma-separated list of programs: train, decode, or frozen, which is the training "
    "of heads or a block drafter (HeadsTrainConfig) for the frozen model.",
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file for all figures.")
_HLO = flags.DEFINE_string("hlo", None, "Folder for the text of compiled programs.")
cli.define_flags(DecodeShapes)


def main() -> None:
    """Compiles the programs that the flags name and prints the tables."""
    unknown = [name for name in _PROGRAM.value if name not in _PROGRAMS]
    if unknown or not _PROGRAM.value:
        raise UserError(
            f"--program={','.join(_PROGRAM.value)} must be a comma-separated list of "
            f"{', '.join(_PROGRAMS)}."
        )
    if _OUTPUT.value:
        check_writable(_OUTPUT.value)
    if _HLO.value:
        for name in _PROGRAM.value:
            check_writable(as_path(_HLO.value) / f"{name}.txt")
    shapes = DecodeShapes(**cli.flag_values(DecodeShapes))
    accelerators = find_slice(cli.required("topology"), _SLICES.value)
    # All programs are validated before the first one is compiled.
    programs: list[Program] = []
    meshes: list[Mesh] = []
    for name in _PROGRAM.value:
        if name == "frozen":
            training = configuration.parse_flags(HeadsTrainConfig).value
            model = configuration.parse_flags(BlockwiseConfig).value
            mesh = make_mesh(training.mesh or MeshConfig(), accelerators.devices)
            programs += frozen_programs(training, model, mesh)
        else:
            config = configuration.parse_flags(TrainConfig).value
            mesh = make_mesh(config.mesh, accelerators.devices)
            if name == "train":
                programs.append(train_program(config, mesh))
            else:
                programs.append(decode_program(config.model, shapes, mesh))
        meshes.append(mesh)
        if mesh != meshes[0]:
            raise UserError(
                f"--program={name} has the mesh {dict(mesh.shape)} and "
                f"--program={_PROGRAM.value[0]} {dict(meshes[0].shape)}: compile them "
                "one at a time."
            )
    measured: list[Measured] = []
    for program in programs:
        print(f"compiling {program.name} for {accelerators.name} ...", file=sys.stderr)
        measured.append(compile_for(program, mesh, accelerators, _HLO.value))
    compile_report.print_figures(accelerators, dict(mesh.shape), measured)
    for one in measured:
        compile_report.print_collectives(one)
    if _OUTPUT.value:
        figures = compile_report.as_json(accelerators, dict(mesh.shape), measured)
        write_json(_OUTPUT.value, figures)
        print(f"written to {_OUTPUT.value}")


if __name__ == "__main__":
    cli.run(main)
