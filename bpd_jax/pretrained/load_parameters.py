"""Loads the tensors of a checkpoint onto devices, one tensor at a time."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from bpd_jax import progress
from bpd_jax.models.blockwise import init_boxed
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.partitioning import parameter_shardings, unbox
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.pretrained.llama_layout import Origin, Path
from bpd_jax.typing import Array, Params

# A cache line has 16 or 32 numbers.
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

    At any time, memory contains the parameters, one tensor of the checkpoint and its
    shard for one device. With several hosts, each host converts only the shards of its
    own devices.

    Args:
      config: configuration of the trunk; parameters have its `param_dtype`.
      layout: location of each parameter.
      tensors: the checkpoint.
      mesh: devices over which the parameters are sharded; None is the first device.

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
            loaded = _put_shards(values, leaf.dtype, sharding)
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


def _put_shards(
    values: np.ndarray, dtype: np.dtype, sharding: jax.sharding.Sharding
) -> Array:
    """Copies the shards one after another to their devices."""
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
    """A copy in row-major order; always a copy, because a device may keep the array.

    Several rows are copied at a time: the rows of a transposed matrix are columns, so
    every cache line is read once, not once for each of its numbers.
    """
    copy = np.empty(values.shape, dtype)
    for begin in range(0, len(values), _ROWS):
        copy[begin : begin + _ROWS] = values[begin : begin + _ROWS]
    return copy
