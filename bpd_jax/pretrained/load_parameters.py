"""From the tensors of a checkpoint to parameters on devices, one tensor at a time."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from bpd_jax import progress
from bpd_jax.models.blockwise import init_boxed
from bpd_jax.models.config import BlockwiseConfig, TransformerConfig
from bpd_jax.models.partitioning import parameter_shardings, unbox
from bpd_jax.pretrained.llama_layout import Origin, Path
from bpd_jax.typing import Array, Params

# A line of memory holds 16 or 32 numbers.
_ROWS = 32


class Tensors(Protocol):
    """The tensors of a checkpoint on disk, in Hugging Face's names and shapes."""

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as float32 or in its own narrower float type.

        Raises:
          UserError: it is missing or damaged.
        """


def load_trunk(
    config: TransformerConfig,
    layout: Mapping[Path, Origin],
    tensors: Tensors,
    mesh: jax.sharding.Mesh | None = None,
) -> Params:
    """Reads the parameters of a model without block heads.

    Besides the parameters there is never more than one tensor, as it was read, and the
    piece of it that goes to one device. On many hosts each converts only the pieces of
    its own devices.

    Args:
      config: of the trunk; parameters are made in its `param_dtype`.
      layout: where each parameter lies.
      tensors: the checkpoint.
      mesh: devices to spread the parameters over; None is the first one.

    Raises:
      UserError: a tensor is missing, damaged or of another shape.
    """
    model = BlockwiseConfig(config)
    boxed = jax.eval_shape(lambda: init_boxed(model, jax.random.key(0)))
    shapes = unbox(boxed)
    if mesh is None:
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: first, shapes)
    else:
        shardings = parameter_shardings(boxed, mesh)

    total = len(jax.tree.leaves(shapes))
    with progress.bar(label="loading", total=total, unit="tensor") as bar:

        def load(path: Any, leaf: Any, sharding: jax.sharding.Sharding) -> Array:
            # The first key is `trunk`, which a model with heads has too.
            origin = layout[tuple(entry.key for entry in path[1:])]
            values = origin.convert(read_tensor(tensors, origin))
            assert values.shape == leaf.shape, (origin.name, values.shape, leaf.shape)
            loaded = _place(values, leaf.dtype, sharding)
            bar.update()
            return loaded

        return jax.tree_util.tree_map_with_path(load, shapes, shardings)


def read_tensor(tensors: Tensors, origin: Origin) -> np.ndarray:
    """Returns a tensor as it is stored.

    Raises:
      UserError: it is missing, damaged or of another shape.
    """
    tensor = tensors.read(origin.name)
    origin.check_shape(tensor.shape)
    return tensor


def _place(
    values: np.ndarray, dtype: np.dtype, sharding: jax.sharding.Sharding
) -> Array:
    """Copies one shard after another to the devices that hold it."""
    indices = sharding.addressable_devices_indices_map(values.shape)
    owners: dict[tuple[tuple[int | None, int | None], ...], list[jax.Device]] = {}
    for device, index in indices.items():
        assert index is not None
        bounds = tuple((part.start, part.stop) for part in index)
        owners.setdefault(bounds, []).append(device)
    shards: list[Array] = []
    for bounds, devices in owners.items():
        shard = _copied(values[tuple(slice(*b) for b in bounds)], dtype)
        shards += (jax.device_put(shard, device) for device in devices)
        jax.block_until_ready(shards)
        del shard
    return jax.make_array_from_single_device_arrays(values.shape, sharding, shards)


def _copied(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy in row-major order, always: a device may keep the array it is given.

    Rows are copied some at a time. Of a transposed matrix they are columns, and so
    every line of memory is fetched once, not once for each of its numbers.
    """
    copy = np.empty(values.shape, dtype)
    for begin in range(0, len(values), _ROWS):
        copy[begin : begin + _ROWS] = values[begin : begin + _ROWS]
    return copy
