"""Device meshes, and the one table that maps logical axes to mesh axes.

Layers name what an axis means (`embed`, `mlp`, …); the table says which mesh axis
splits it. A mesh has three axes: `data` splits the batch, `fsdp` splits the batch
and the parameters, `model` splits heads, feed-forward width and vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bpd_jax.errors import UserError
from bpd_jax.settings import Check, Count, Validated
from bpd_jax.typing import PyTree

# Names of parameter axes.
EMBED, HEADS, KV, MLP, VOCAB = "embed", "heads", "kv", "mlp", "vocab"
POSITION, BLOCK_HEAD, LAYER = "position", "block_head", "layer"

RULES: tuple[tuple[str, str | None], ...] = (
    (EMBED, "fsdp"),
    (HEADS, "model"),
    (KV, None),
    (MLP, "model"),
    (VOCAB, "model"),
    (POSITION, None),
    (BLOCK_HEAD, None),
    (LAYER, None),
)

BATCH_SPEC = PartitionSpec(("data", "fsdp"))

COUNT_OR_REST = Check(
    "a positive integer, or -1 for what is left",
    int,
    lambda value: type(value) is int and (value > 0 or value == -1),
    flag=int,
)


@dataclasses.dataclass(frozen=True)
class MeshConfig(Validated):
    """How many devices each mesh axis takes; `data=-1` takes what is left."""

    data: Annotated[int, COUNT_OR_REST] = -1
    fsdp: Count = 1
    model: Count = 1


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the mesh over devices, laid out to suit the network that joins them.

    Args:
      config: sizes of the axes.
      devices: those to use, which may be of a topology that is not at hand; None for
        all that there are.

    Raises:
      UserError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    data = count // (config.fsdp * config.model) if config.data == -1 else config.data
    if data * config.fsdp * config.model != count:
        raise UserError(
            f"MeshConfig asks for data × fsdp × model = {config.data} × {config.fsdp} "
            f"× {config.model}, but there are {count} devices: make the product equal."
        )
    shape = (data, config.fsdp, config.model)
    if any(getattr(device, "core_on_chip", 0) for device in devices):
        # Two devices per chip, side by side already; jax lays out whole chips only.
        laid_out = np.asarray(devices).reshape(shape)
    else:
        # An axis may take a part of a side of a slice, which `jax.make_mesh` refuses.
        laid_out = mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )
    # Auto axes: under explicit ones Linen's constraints would be assertions.
    return Mesh(laid_out, ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)


def parameter_shardings(boxed: PyTree, mesh: Mesh) -> PyTree:
    """Returns a NamedSharding for every parameter.

    An axis that a mesh axis cannot cut evenly stays whole.

    Args:
      boxed: parameters (or their shapes) with Linen's axis-name boxes.
      mesh: from `make_mesh`.
    """
    specs = nn.get_partition_spec(boxed)
    shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
    return jax.tree.map(_evenly, unbox(boxed), shardings)


def check_rows(name: str, rows: int, mesh: Mesh) -> None:
    """Raises a `UserError` unless every part of the mesh gets as many rows of a batch.

    Args:
      name: of the setting, for the message.
      rows: of a batch.
      mesh: from `make_mesh`.
    """
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % parts:
        raise UserError(
            f"{name} = {rows} is not a multiple of the mesh's data × fsdp = {parts}: "
            "change one of them (MeshConfig.model shares out a row)."
        )


def _evenly(array: Any, sharding: NamedSharding) -> NamedSharding:
    """Leaves axes whole that cannot be cut evenly, such as 50,257 tokens by two."""
    mesh = sharding.mesh
    spec = [
        None if axis is not None and size % mesh.shape[axis] else axis
        for size, axis in zip(array.shape, sharding.spec, strict=False)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))


def replicated(mesh: Mesh) -> NamedSharding:
    """A sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def unbox(tree: PyTree) -> Any:
    """Strips Linen's axis-name boxes, leaving plain arrays."""
    return nn.meta.unbox(tree)
