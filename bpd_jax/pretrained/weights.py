"""From the tensors of a checkpoint to parameters on devices, one tensor at a time."""

from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np

from bpd_jax import progress
from bpd_jax.errors import UserError
from bpd_jax.models.blockwise import init_boxed
from bpd_jax.models.config import BlockwiseConfig, TransformerConfig
from bpd_jax.models.partitioning import parameter_shardings, unbox
from bpd_jax.pretrained.layout import Origin, Path
from bpd_jax.typing import Params


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

    Of every tensor there is at most one more copy than its place on the devices.

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
    shardings = None if mesh is None else parameter_shardings(boxed, mesh)
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    places = (
        [jax.devices()[0]] * len(leaves)
        if shardings is None
        else jax.tree_util.tree_leaves(shardings)
    )
    arrays = []
    with progress.bar(label="loading", total=len(leaves), unit="tensor") as bar:
        for (path, leaf), place in zip(leaves, places, strict=True):
            keys = tuple(entry.key for entry in path)
            origin = layout[keys[1:]]
            tensor = tensors.read(origin.name)
            if tensor.shape != origin.shape:
                raise UserError(
                    f"tensor {origin.name} has shape {list(tensor.shape)}, and the "
                    f"configuration asks for {list(origin.shape)}: the checkpoint is "
                    "damaged, or of another model than its configuration."
                )
            mine = origin.convert(tensor).astype(leaf.dtype)
            assert mine.shape == leaf.shape, (keys, mine.shape, leaf.shape)
            arrays.append(jax.block_until_ready(jax.device_put(mine, place)))
            del tensor, mine
            bar.update()
    return jax.tree_util.tree_unflatten(structure, arrays)
