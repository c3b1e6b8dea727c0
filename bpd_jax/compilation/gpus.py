"""Descriptions of NVIDIA GPUs for XLA's compiler, without hardware or driver."""

import importlib.util

import jax
from jax.experimental import topologies

from bpd_jax.base.chips import Chip

# The packages of jax with the compiler, and their modules that jax loads.
PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_MODULES = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# GPUs that the switch of a host joins.
MOST = 8

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
    major, _, minor = chip.gpu.partition(".")
    return (
        f"gpu_device_info {{ {_OF_ALL} {ARCHITECTURES[chip.gpu]} "
        f"memory_bandwidth: {int(chip.hbm)} device_memory_size: {chip.usable} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } '
        f'device_description_str: "{chip.name}"'
    )
