"""Descriptions of TPU slices and of hosts with GPUs, without the hardware."""

import dataclasses
import importlib.util
import os
import re

import jax
from jax.experimental import topologies

from bpd_jax.base.errors import UserError
from bpd_jax.compilation import gpus
from bpd_jax.compilation.chips import Chip, chip_of

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
    """Chips joined by links, or several such slices, joined by a network.

    GPUs of one host are a slice with one side.

    Attributes:
      name: name, such as `v4:4x4x4`, `2 × v4:4x4x4` or `h100:8`.
      chip: peak figures of its chips.
      sides: chips along each side of a slice.
      devices: jax devices of all slices; each of the two cores of a v4 chip is one.
      slices: number of slices.
    """

    name: str
    chip: Chip
    sides: tuple[int, ...]
    devices: tuple[jax.Device, ...]
    slices: int = 1

    def coordinates(self, device: jax.Device) -> tuple[int, ...]:
        """The place of a device's chip in its slice."""
        return tuple(device.coords) if self.chip.gpu is None else (device.id,)


def has_compiler(topology: str) -> bool:
    """Whether the compiler for a topology such as `v5e:4x4` or `h100:8` is installed.

    Raises:
      UserError: the chip is unknown.
    """
    if chip_of(topology).gpu is not None:
        return gpus.is_installed()
    return importlib.util.find_spec("libtpu") is not None


def find_slice(topology: str, slices: int = 1) -> Slice:
    """Describes a slice, or several; needs a compiler's library, but no hardware.

    Args:
      topology: a chip and the sides of a slice, such as `v5e:4x4`, or a GPU and the
        number of GPUs of a host, such as `h100:8`.
      slices: number of slices.

    Raises:
      UserError: the library is not installed, or the slice is invalid.
    """
    chip = chip_of(topology)
    if slices < 1:
        raise UserError(f"--slices={slices} must be 1 or more.")
    text = topology.partition(":")[2]
    if not re.fullmatch("x".join([r"[1-9]\d*"] * chip.dimensions), text):
        needed = "number of GPUs" if chip.gpu else f"{chip.dimensions} dimensions"
        raise UserError(
            f"--topology={topology} must give the {needed} of a slice, for example "
            f"{chip.name}:{'x'.join(['4'] * chip.dimensions)}."
        )
    sides = tuple(map(int, text.split("x")))
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
    if chip.gpu is not None:
        return Slice(topology, chip, sides, gpus.gpu_devices(chip, sides[0]))
    name = topology if slices == 1 else f"{slices} × {topology}"
    return Slice(name, chip, sides, _tpu_devices(topology, slices), slices)


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
