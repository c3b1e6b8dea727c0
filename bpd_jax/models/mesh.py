"""Meshes of devices, and the number of devices along each of their axes."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Annotated

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Check, Count, Validated, configurable

COUNT_OR_REST = Check(
    "a positive integer, or -1 for the remaining devices",
    int,
    lambda value: type(value) is int and (value > 0 or value == -1),
    flag=int,
)


@configurable
@dataclasses.dataclass(frozen=True)
class MeshConfig(Validated):
    """Number of devices of each mesh axis; `data=-1` uses the remaining devices."""

    data: Annotated[int, COUNT_OR_REST] = -1
    fsdp: Count = 1
    model: Count = 1

    def shape(self, devices: int, slices: int = 1) -> tuple[int, int, int]:
        """The sizes of data, fsdp and model, of TPU slices in equal parts."""
        inner = self.fsdp * self.model
        data = devices // inner if self.data == -1 else self.data
        if data * inner != devices:
            raise UserError(
                f"MeshConfig asks for data × fsdp × model = {self.data} × {self.fsdp} "
                f"× {self.model}, but there are {devices} devices: make the product "
                "equal, or give another file of gin_configs/meshes/."
            )
        if data % slices:
            raise UserError(
                f"MeshConfig.data = {data} is not a multiple of the {slices} TPU "
                "slices: only the data axis may cross from one slice to another; make "
                f"fsdp × model divide the {devices // slices} devices of a slice."
            )
        return data, self.fsdp, self.model


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds a mesh over devices, slice by slice along its first axis, `data`.

    Fast links connect the chips of a TPU slice; slices communicate over the slower
    data-centre network. Therefore only `data` spans slices: a training step then sends
    one sum of gradients across that network.

    Worked example: with `data = 4` and `fsdp = 2` over two slices of four chips, rows 0
    and 1 of the mesh are on the first slice, rows 2 and 3 on the second. `devices` are
    possibly those of a topology description; None for all.
    """
    devices = jax.devices() if devices is None else devices
    slices = collections.defaultdict(list)
    for device in devices:
        slices[slice_of(device)].append(device)
    data, fsdp, model = config.shape(len(devices), len(slices))
    shape = data // len(slices), fsdp, model
    laid_out = [_laid_out(slices[index], shape) for index in sorted(slices)]
    # Auto axes, because with explicit axes Linen's constraints are assertions.
    axis_types = (AxisType.Auto,) * 3
    return Mesh(
        np.concatenate(laid_out), ("data", "fsdp", "model"), axis_types=axis_types
    )


def _laid_out(devices: Sequence[jax.Device], shape: tuple[int, int, int]) -> np.ndarray:
    """The devices of a slice in an order that suits their network."""
    if any(getattr(device, "core_on_chip", 0) for device in devices):
        # The devices of a chip are adjacent already; jax can arrange only chips.
        return np.asarray(devices).reshape(shape)
    # An axis may cover a part of a physical axis, unlike in `jax.make_mesh`.
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def slice_of(device: jax.Device) -> int:
    """The slice index of a TPU; 0 for all other devices.

    GPUs have a slice index too, that of their host, but share one fast network.
    """
    return int(getattr(device, "slice_index", 0)) if device.platform == "tpu" else 0


def decoding_mesh(mesh: Mesh | MeshConfig | None) -> Mesh | None:
    """The mesh for decoding; None for a single device, which needs none."""
    if isinstance(mesh, MeshConfig):
        mesh = make_mesh(mesh)
    return None if mesh is None or mesh.size == 1 else mesh
