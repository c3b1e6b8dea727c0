"""Compiles a program for a TPU slice or a host with GPUs, without the hardware.

What the compiler says of it, and the least time of a step.
"""

import collections
import dataclasses
import importlib.util
import os
import re
import time
from typing import Any

import jax
from jax.experimental import topologies

from bpd_jax.base.chips import Chip, chip_of, sides_of
from bpd_jax.base.errors import UserError
from bpd_jax.compilation.programs import Program
from bpd_jax.models import device_ops
from bpd_jax.storage.files import write_text
from bpd_jax.storage.paths import as_path

# When it is loaded, the library looks for a TPU and for the host's name in the cloud;
# these settings silence it if there is neither. Several processes may compile at once.
_QUIET = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
_MEGACORE = "-megacore"

# The packages of jax with the compiler, and their modules that jax loads.
CUDA_PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_CUDA_MODULES = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# GPUs that the switch of a host joins.
_MOST_GPUS = 8

# Without a GPU, XLA cannot time alternatives; each product gets a default tiling.
COMPILER_OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}

# What the compiler must know of a GPU, by its compute capability: number of streaming
# multiprocessors, float32 units and bytes of shared memory of one, … Source: the tables
# "Technical Specifications per Compute Capability" of NVIDIA's CUDA programming guide,
# and the white papers "NVIDIA Ada", "NVIDIA A100" and "NVIDIA H100" (SXM).
ARCHITECTURES = {
    "8.9": "core_count: 58 fpus_per_core: 128 clock_rate_ghz: 2.04 l2_cache_size: "
    "50331648 shared_memory_per_core: 102400 shared_memory_per_block_optin: 101376 "
    "threads_per_core_limit: 1536",
    "8.0": "core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41 l2_cache_size: "
    "41943040 shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912 "
    "threads_per_core_limit: 2048",
    "9.0": "core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: "
    "52428800 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 "
    "threads_per_core_limit: 2048",
}
_OF_ALL = (
    "threads_per_block_limit: 1024 threads_per_warp: 32 "
    "shared_memory_per_block: 49152 registers_per_core_limit: 65536 "
    "registers_per_block_limit: 65536 block_dim_limit_x: 2147483647 "
    "block_dim_limit_y: 65535 block_dim_limit_z: 65535"
)


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips joined by links, or several such slices; the GPUs of one host are a slice.

    Attributes:
      name: name, such as `v4:4x4x4`, `2 × v4:4x4x4` or `h100:8`.
      chip: peak figures of its chips.
      devices: jax devices of all slices; each of the two cores of a v4 chip is one.
    """

    name: str
    chip: Chip
    devices: tuple[jax.Device, ...]


def has_compiler(topology: str) -> bool:
    """Whether the compiler for a topology such as `h100:8` is installed."""
    find = importlib.util.find_spec
    if chip_of(topology).gpu is None:
        return find("libtpu") is not None
    return find("jax_plugins") is not None and any(map(find, _CUDA_MODULES))


def find_slice(topology: str, slices: int = 1) -> Slice:
    """Describes a slice, or several; needs a compiler's library, but no hardware.

    Args:
      topology: such as `v5e:4x4`, or `h100:8` for a host with eight GPUs.
      slices: number of slices.
    """
    chip, sides = chip_of(topology), sides_of(topology)
    if slices < 1:
        raise UserError(f"--slices={slices} must be 1 or more.")
    if chip.gpu is not None and (slices > 1 or sides[0] > _MOST_GPUS):
        raise UserError(
            f"--topology={topology} with --slices={slices} is more than one host, "
            f"which only TPUs can be: give {_MOST_GPUS} or fewer GPUs and one slice."
        )
    if not has_compiler(topology):
        kind, family = ("gpu", "GPU") if chip.gpu else ("tpu", "TPU")
        package = "jax's package for CUDA" if chip.gpu else "libtpu"
        raise UserError(
            f"the {family} compiler, {package}, is not installed here: `make "
            f"{kind}-compile` sets up an environment that has it."
        )
    # The host computes nothing itself, and does not use an accelerator of its own.
    jax.config.update("jax_platforms", "cpu")
    # Programs for absent devices can be written to the cache, but not read.
    jax.config.update("jax_enable_compilation_cache", False)
    device_ops.compile_for("tpu" if chip.gpu is None else "gpu")
    if chip.gpu is not None:
        description = topologies.get_topology_desc(
            platform="cuda", topology=f"1x1x{sides[0]}", target_config=gpu_target(chip)
        )
        return Slice(topology, chip, tuple(description.devices))
    for setting, value in _QUIET.items():
        os.environ.setdefault(setting, value)
    try:
        description = topologies.get_topology_desc(
            platform="tpu",
            topology_name=topology.replace(_MEGACORE, ""),
            **({"chip_config_name": "megacore"} if _MEGACORE in topology else {}),
            **({"num_slices": slices} if slices > 1 else {}),
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0].partition(": ")[2].rstrip(".")
        raise UserError(
            f"--topology={topology} is not supported by the TPU compiler: {reason}."
        ) from error
    name = topology if slices == 1 else f"{slices} × {topology}"
    return Slice(name, chip, tuple(description.devices))


def gpu_target(chip: Chip) -> str:
    """XLA's `GpuTargetConfigProto` of a GPU, as text."""
    assert chip.gpu is not None
    major, _, minor = chip.gpu.partition(".")
    return (
        f"gpu_device_info {{ {_OF_ALL} {ARCHITECTURES[chip.gpu]} "
        f"memory_bandwidth: {int(chip.hbm)} device_memory_size: {chip.usable} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } '
        f'device_description_str: "{chip.name}"'
    )


def compile_for(
    program: Program, accelerators: Slice, folder: str | None = None
) -> dict[str, Any]:
    """Compiles a program; one that does not fit the memory is a `UserError`.

    Its compiled text is written to `folder/NAME.txt`, if there is a folder.

    Returns:
      Figures of one core or GPU and one run, for JSON. `memory_per_core` is in bytes,
      by the compiler's own analysis: `arguments`, with donated ones; `outputs`, with
      those in donated memory; `donated`, the outputs that reuse the memory of
      arguments; `temporaries`; `code`; `needed`, the total; and `usable` of the core.
      `minimum_seconds` is a lower bound of the time: that of the model's FLOPs at the
      chip's peak, and that of reading parameters and cache once.
    """
    start, chip = time.perf_counter(), accelerators.chip
    lowered = program.lower()
    try:
        compiled = lowered.compile(COMPILER_OPTIONS if chip.gpu else None)
    except jax.errors.JaxRuntimeError as error:
        if not _OUT_OF_MEMORY.match(str(error)):
            raise
        reason = str(error).partition("\n")[0].partition(": ")[2].rstrip(".")
        raise _refusal(program, accelerators, reason) from error
    seconds = time.perf_counter() - start
    text, analysis = compiled.as_text() or "", compiled.memory_analysis()
    assert analysis is not None
    if folder is not None:
        write_text(as_path(folder) / f"{program.name}.txt", text)
    memory = {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "donated": analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "code": analysis.generated_code_size_in_bytes,
    }
    needed = sum(memory.values()) - 2 * memory["donated"]
    if chip.gpu and needed > chip.usable:
        # The GPU compiler does not refuse such a program.
        reason = f"it needs {needed / 2**30:.2f} of {chip.usable / 2**30:.2f} GiB"
        raise _refusal(program, accelerators, reason)
    flops = program.model_flops / program.mesh.size
    return {
        "about": program.about,
        "mesh": dict(program.mesh.shape),
        "compile_seconds": round(seconds, 1),
        "memory_per_core": {**memory, "needed": needed, "usable": chip.usable},
        "collectives": count_collectives(text),
        "model_flops_per_core": flops,
        "read_bytes_per_core": program.reads,
        "minimum_seconds": {
            "compute": flops / (chip.flops / chip.cores),
            "reading": program.reads / (chip.hbm / chip.cores),
        },
    }


_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|(?:ragged-)?all-to-all|"
    r"collective-permute|collective-broadcast)(?:-start)?\((.*)"
)


def count_collectives(text: str) -> dict[str, int]:
    """Collectives in a compiled program's text; the body of a loop counts once.

    The TPU compiler repeats a collective, with its channel, in every fusion that it
    overlaps with it.

    >>> count_collectives('''
    ...   %a = f32[8]{0} all-gather(%p), channel_id=3, dimensions={0}
    ...   %b = (f32[4], f32[4]) all-reduce-start(%a, %p), channel_id=4
    ...   %c = f32[8]{0} all-gather(%q), channel_id=3, dimensions={0}
    ... ''')
    {'all-gather': 1, 'all-reduce': 1}
    """
    found = {
        (kind, channel[0] if (channel := re.search(r"channel_id=\d+", rest)) else n)
        for n, (kind, rest) in enumerate(_COLLECTIVE.findall(text))
    }
    return dict(sorted(collections.Counter(kind for kind, _ in found).items()))


# The TPU compiler's refusal, of a program whose arguments or temporaries do not fit.
_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED: .*(memory space hbm|available HBM)")


def _refusal(program: Program, accelerators: Slice, reason: str) -> UserError:
    return UserError(
        f"the {program.name} step does not fit on {accelerators.name}: {reason}; shard "
        "the parameters over more devices (MeshConfig.fsdp, model), store fewer "
        "activations (ComputeConfig.remat, loss_chunk) or split the batch "
        "(ComputeConfig.accumulate)."
    )
