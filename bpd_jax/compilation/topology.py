"""Descriptions of TPU slices and of hosts with GPUs, without the hardware."""

import dataclasses
import importlib.util
import os

import jax
from jax.experimental import topologies

from bpd_jax.base.chips import Chip, chip_of, sides_of
from bpd_jax.base.errors import UserError
from bpd_jax.compilation import gpus
from bpd_jax.models import cpu

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
    if chip_of(topology).gpu is not None:
        return gpus.is_installed()
    return importlib.util.find_spec("libtpu") is not None


def find_slice(topology: str, slices: int = 1) -> Slice:
    """Describes a slice, or several; needs a compiler's library, but no hardware.

    Args:
      topology: such as `v5e:4x4`, or `h100:8` for a host with eight GPUs.
      slices: number of slices.
    """
    chip, sides = chip_of(topology), sides_of(topology)
    if slices < 1:
        raise UserError(f"--slices={slices} must be 1 or more.")
    if chip.gpu is not None and (slices > 1 or sides[0] > gpus.MOST):
        raise UserError(
            f"--topology={topology} with --slices={slices} is more than one host, "
            f"which only TPUs can be: give {gpus.MOST} or fewer GPUs and one slice."
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
    cpu.compile_for("tpu" if chip.gpu is None else "gpu")
    if chip.gpu is not None:
        return Slice(topology, chip, gpus.gpu_devices(chip, sides[0]))
    name = topology if slices == 1 else f"{slices} × {topology}"
    return Slice(name, chip, _tpu_devices(topology, slices))


def _tpu_devices(topology: str, slices: int) -> tuple[jax.Device, ...]:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
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
    return tuple(description.devices)
