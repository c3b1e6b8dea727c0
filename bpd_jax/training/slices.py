"""Device meshes over several TPU slices.

Fast links connect the chips of a slice; different slices communicate over the slower
data-centre network. Therefore only the `data` axis spans slices: a training step then
sends one sum of gradients across that network.
"""

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from bpd_jax.models import partitioning
from bpd_jax.models.partitioning import MeshConfig


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh over devices, slice by slice along its first axis, `data`.

    Worked example: with `data = 4` and `fsdp = 2` over two slices of four chips, rows 0
    and 1 of the mesh are on the first slice, rows 2 and 3 on the second.

    Args:
      config: sizes of the axes over all slices together.
      devices: devices to use, possibly those of a topology description; None for all
        devices of the run.
    """
    devices = jax.devices() if devices is None else devices
    slices = collections.defaultdict(list)
    for device in devices:
        slices[slice_of(device)].append(device)
    data, _, _ = config.shape(len(devices), len(slices))
    if len(slices) == 1:
        return partitioning.make_mesh(config, devices)
    each = dataclasses.replace(config, data=data // len(slices))
    meshes = [partitioning.make_mesh(each, slices[index]) for index in sorted(slices)]
    laid_out = np.concatenate([mesh.devices for mesh in meshes])
    names = meshes[0].axis_names
    return Mesh(laid_out, names, axis_types=(AxisType.Auto,) * len(names))


def decoding_mesh(mesh: Mesh | MeshConfig | None) -> Mesh | None:
    """The mesh for decoding; None for a single device, which needs none."""
    if isinstance(mesh, MeshConfig):
        mesh = make_mesh(mesh)
    return None if mesh is None or mesh.size == 1 else mesh


def slice_of(device: jax.Device) -> int:
    """The slice index of a TPU; 0 for all other devices.

    GPUs have a slice index too, that of their host, but share one fast network.
    """
    return int(getattr(device, "slice_index", 0)) if device.platform == "tpu" else 0
