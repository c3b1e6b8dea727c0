"""Descriptions of NVIDIA GPUs for XLA's compiler, without hardware or driver."""

import dataclasses
import importlib.util

import jax
from jax.experimental import topologies

from bpd_jax.compilation.chips import Chip

# The packages of jax with the compiler, and their modules that jax loads.
PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_MODULES = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# GPUs that the switch of a host joins.
MOST = 8

# Without a GPU, XLA cannot time alternatives; each product gets a default tiling.
COMPILER_OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Properties of GPUs of one compute capability that XLA's compiler requires.

    Source: the tables "Technical Specifications per Compute Capability" of NVIDIA's
    CUDA programming guide, and the white papers "NVIDIA A100" and "NVIDIA H100".

    Attributes:
      major, minor: compute capability.
      processors: number of streaming multiprocessors (SXM).
      lanes: float32 units of one of them.
      shared: bytes of shared memory of one of them.
      shared_by_block: bytes of shared memory that a block may ask for.
      cache: bytes of the second-level cache.
      gigahertz: highest clock rate.
    """

    major: int
    minor: int
    processors: int
    lanes: int
    shared: int
    shared_by_block: int
    cache: int
    gigahertz: float


_KIB, _MIB = 2**10, 2**20

ARCHITECTURES = {
    "8.0": Architecture(8, 0, 108, 64, 164 * _KIB, 163 * _KIB, 40 * _MIB, 1.41),
    "9.0": Architecture(9, 0, 132, 128, 228 * _KIB, 227 * _KIB, 50 * _MIB, 1.98),
}


def gpu_devices(chip: Chip, count: int) -> tuple[jax.Device, ...]:
    """The devices of one host with `count` GPUs; `jax_platforms` must be `cpu`."""
    description = topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{count}", target_config=target(chip)
    )
    return tuple(description.devices)


def is_installed() -> bool:
    """Whether jax's package for CUDA is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(module) for module in _MODULES)


def target(chip: Chip) -> str:
    """XLA's `GpuTargetConfigProto` of a GPU, as text."""
    assert chip.gpu is not None
    about = ARCHITECTURES[chip.gpu]
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * _KIB,
        "shared_memory_per_core": about.shared,
        "shared_memory_per_block_optin": about.shared_by_block,
        "threads_per_core_limit": 2048,
        "core_count": about.processors,
        "fpus_per_core": about.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "memory_bandwidth": int(chip.hbm),
        "l2_cache_size": about.cache,
        "clock_rate_ghz": about.gigahertz,
        "device_memory_size": chip.usable,
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in fields.items())
    capability = f"major: {about.major} minor: {about.minor}"
    return (
        f"gpu_device_info {{\n{lines}\n"
        f"  cuda_compute_capability {{ {capability} }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 8 }\n"
        f'device_description_str: "{chip.name}"\n'
    )
