"""Device meshes, and the table that maps logical axes to mesh axes.

Layers give parameter axes logical names (`embed`, `mlp`, …), which the table maps to
mesh axes. A mesh has three axes: `data` shards the batch, `fsdp` shards the batch and
the parameters, `model` shards heads, feed-forward width and vocabulary.
"""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import PyTree

# Names of parameter axes.
EMBED, HEADS, KV, MLP, VOCAB = "embed", "heads", "kv", "mlp", "vocab"
POSITION, BLOCK_HEAD, LAYER = "position", "block_head", "layer"
EXPERT = "expert"

RULES: tuple[tuple[str, str | None], ...] = (
    (EMBED, "fsdp"),
    (HEADS, "model"),
    (KV, None),
    (MLP, "model"),
    (VOCAB, "model"),
    (POSITION, None),
    (BLOCK_HEAD, None),
    (LAYER, None),
    (EXPERT, None),
)

BATCH_SPEC = PartitionSpec(("data", "fsdp"))


def with_shardings(boxed: PyTree, mesh: Mesh | None) -> PyTree:
    """Shape, dtype and sharding of parameters in Linen's boxes with axis names.

    Axes that a mesh axis does not divide evenly are not sharded; without a mesh,
    parameters are on the first device.
    """
    shapes = unbox(boxed)
    if mesh is None:
        one = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: one, shapes)
    else:
        specs = nn.get_partition_spec(boxed)
        wanted = nn.logical_to_mesh_sharding(specs, mesh, RULES)
        shardings = jax.tree.map(_evenly, shapes, wanted)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def row_parts(mesh: Mesh | None) -> int:
    """Number of parts into which a mesh splits a batch of rows; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def heads_spec(heads: int, mesh: Mesh | None) -> PartitionSpec:
    """The spec of arrays `[B, K, …]` of rows and key-value heads, as of the cache."""
    even = mesh is not None and heads % mesh.shape["model"] == 0
    return PartitionSpec(*BATCH_SPEC, "model" if even else None)


def even_rows(count: int, mesh: Mesh | None) -> int:
    """The least number of rows, at least `count`, that a mesh splits evenly."""
    parts = row_parts(mesh)
    return -(-count // parts) * parts


def first_device(mesh: Mesh | None) -> jax.Device:
    """The first device of a mesh, or of jax without one; all are of the same kind."""
    return jax.devices()[0] if mesh is None else mesh.devices.flat[0]


def has_tensor_cores(device: jax.Device) -> bool:
    """Whether it is an NVIDIA GPU of compute capability 8.0 or higher."""
    # Other makers' GPUs have names there, such as gfx942.
    capability = str(getattr(device, "compute_capability", ""))
    major = capability.partition(".")[0]
    return device.platform == "gpu" and major.isdigit() and int(major) >= 8


def attention_spec(
    rows: int, heads: int, mesh: Mesh, *, heads_axis: int
) -> PartitionSpec:
    """Rows over the batch's axes, heads over `model`, where they divide evenly."""
    between = [None] * (heads_axis - 1)
    return PartitionSpec(
        None if rows % row_parts(mesh) else BATCH_SPEC[0],
        *between,
        None if heads % mesh.shape["model"] else "model",
    )


def constrain(array: jax.Array, mesh: Mesh | None, spec: PartitionSpec) -> jax.Array:
    """Constrains the sharding of an intermediate result; nothing on one device."""
    if mesh is None or mesh.size == 1:
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def check_rows(name: str, rows: int, mesh: Mesh) -> None:
    """Checks that the mesh divides the rows of a batch evenly."""
    parts = row_parts(mesh)
    if rows % parts:
        raise UserError(
            f"{name} = {rows} is not a multiple of the mesh's data × fsdp = {parts}: "
            "change one of them (MeshConfig.model shards each row)."
        )


def _evenly(array: Any, sharding: NamedSharding) -> NamedSharding:
    """Replicates axes that are not divided evenly, such as 50,257 tokens by two."""
    mesh = sharding.mesh
    spec = [
        None if axis is not None and size % mesh.shape[axis] else axis
        for size, axis in zip(array.shape, sharding.spec, strict=False)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that is replicated on all devices."""
    return NamedSharding(mesh, PartitionSpec())


def placed(array: Any, sharding: Sharding) -> jax.Array:
    """An array with a sharding, from one that every process has on its host.

    Only the parts of this process are read, so the array may be mapped from a file.
    """
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def in_rows(tree: PyTree, mesh: Mesh | None) -> Any:
    """Arrays `[B, …]` of the host, each row on its devices; as they are without a mesh.

    Every process has the whole arrays.
    """
    if mesh is None:
        return tree
    sharding = NamedSharding(mesh, BATCH_SPEC)
    return jax.tree.map(lambda x: placed(np.asarray(x), sharding), tree)


def own_rows(rows: int, mesh: Mesh | None) -> Any:
    """The indices of the rows of a batch that this process holds."""
    if mesh is None:
        return slice(None)
    parts = NamedSharding(mesh, BATCH_SPEC).addressable_devices_indices_map((rows,))
    return np.unique([np.arange(rows)[index] for index in parts.values()])


def from_own_rows(tree: PyTree, mesh: Mesh | None) -> Any:
    """Arrays `[B, …]` of which each process has the rows of `own_rows`."""
    if mesh is None:
        return tree
    join = jax.make_array_from_process_local_data
    sharding = NamedSharding(mesh, BATCH_SPEC)
    return jax.tree.map(lambda x: join(sharding, np.asarray(x)), tree)


def everywhere(tree: PyTree, mesh: Mesh | None) -> Any:
    """Arrays that are whole on every device; as they are without a mesh.

    Arrays that are sharded over the mesh already remain so.
    """
    if mesh is None:
        return tree
    sharding = replicated(mesh)

    def put(leaf: Any) -> Any:
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf
        return placed(np.asarray(leaf), sharding)

    return jax.tree.map(put, tree)


def on_host(tree: PyTree) -> Any:
    """Arrays as numpy arrays, whole in every process."""

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return leaf
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree))


def unbox(tree: PyTree) -> Any:
    """Removes Linen's boxes with axis names."""
    return nn.meta.unbox(tree)
