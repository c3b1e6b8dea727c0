"""Device meshes, and the one table that maps logical axes to mesh axes.

Layers name what an axis means (`embed`, `mlp`, …); the table says which mesh axis
splits it. A mesh has three axes: `data` splits the batch, `fsdp` splits the batch
and the parameters, `model` splits heads, feed-forward width and vocabulary.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bpd_jax.errors import UserError
from bpd_jax.typing import PyTree

# Names of parameter axes.
EMBED, HEADS, KV, MLP, VOCAB = "embed", "heads", "kv", "mlp", "vocab"
POSITION, BLOCK_HEAD = "position", "block_head"

RULES: tuple[tuple[str, str | None], ...] = (
    (EMBED, "fsdp"),
    (HEADS, "model"),
    (KV, None),
    (MLP, "model"),
    (VOCAB, "model"),
    (POSITION, None),
    (BLOCK_HEAD, None),
)

BATCH_SPEC = PartitionSpec(("data", "fsdp"))


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each mesh axis takes; `data=-1` takes what is left."""

    data: int = -1
    fsdp: int = 1
    model: int = 1


def make_mesh(config: MeshConfig) -> Mesh:
    """Builds the mesh over all devices, in their given order.

    Raises:
      UserError: the axes do not multiply to the number of devices.
    """
    count = jax.device_count()
    data = count // (config.fsdp * config.model) if config.data == -1 else config.data
    if data * config.fsdp * config.model != count:
        raise UserError(
            f"MeshConfig asks for data × fsdp × model = {config.data} × {config.fsdp} "
            f"× {config.model}, but there are {count} devices: make the product equal."
        )
    # Auto axes: under explicit ones Linen's constraints would be assertions.
    return jax.make_mesh(
        (data, config.fsdp, config.model),
        ("data", "fsdp", "model"),
        axis_types=(AxisType.Auto,) * 3,
    )


def parameter_shardings(boxed: PyTree, mesh: Mesh) -> PyTree:
    """Returns a NamedSharding for every parameter.

    Args:
      boxed: parameters (or their shapes) with Linen's axis-name boxes.
      mesh: from `make_mesh`.
    """
    specs = nn.get_partition_spec(boxed)
    return nn.logical_to_mesh_sharding(specs, mesh, RULES)


def replicated(mesh: Mesh) -> NamedSharding:
    """A sharding that keeps a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def unbox(tree: PyTree) -> Any:
    """Strips Linen's axis-name boxes, leaving plain arrays."""
    return nn.meta.unbox(tree)
