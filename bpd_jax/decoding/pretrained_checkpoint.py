"""Pretrained checkpoints, and their parameters, which are loaded tensor by tensor.

The core knows what a checkpoint is; the package `bpd_jax.formats` reads the files of
other programs, and is imported only when there are some.
"""

import dataclasses
import importlib
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
import tokenizers
from jax.sharding import Mesh

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.parameters import abstract_parameters
from bpd_jax.models.products import Packed
from bpd_jax.models.quantized import QuantizedMatrix, kernel_rows, summed_axes
from bpd_jax.models.transformer_config import TransformerConfig

# Parameters that may be quantized; a kernel is then packed.
_KERNEL = "kernel"
_MATRICES = (_KERNEL, "embedding", "softmax")

# A cache line has 16 or 32 numbers.
_ROWS = 32


Path = tuple[str, ...]
Convert = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Origin:
    """The tensor of a checkpoint that contains a parameter.

    Attributes:
      name: name of the tensor; one tensor may contain several parameters.
      shape: shape of the stored tensor.
      convert: converts the stored tensor to the parameter; returns a view.
      experts: number of tensors of this name, with their numbers at {}, and this shape
        that are stacked and then converted; None for one tensor.
    """

    name: str
    shape: tuple[int, ...]
    convert: Convert = np.asarray
    experts: int | None = None

    @property
    def parts(self) -> list["Origin"]:
        """The tensors that are stacked."""
        return [
            Origin(self.name.format(number), self.shape)
            for number in range(self.experts or 0)
        ]

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Checks that this is the shape of the stored tensor."""
        if shape != self.shape:
            raise UserError(
                f"tensor {self.name} has shape {list(shape)}, but the configuration "
                f"requires {list(self.shape)}: the checkpoint is damaged, or belongs "
                "to another model than its configuration."
            )

    def stored(self, parameter: np.ndarray) -> np.ndarray:
        """The inverse of `convert`, for a tensor that is a single parameter."""
        tensor = np.empty(self.shape, parameter.dtype)
        view = self.convert(tensor)
        assert np.shares_memory(view, tensor)
        view[...] = parameter
        return tensor


class Tensors(Protocol):
    """The tensors of a checkpoint on disk, in Hugging Face's names and shapes."""

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as float32 or in its own narrower float type."""

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        """Returns a matrix `[output, input]` in its blocks; None if it has none."""


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """The contents of a checkpoint; `load_trunk` reads its parameters.

    Attributes:
      config: configuration of the trunk.
      layout: location of each parameter, by its path in the trunk.
      tensors: the tensors of the checkpoint.
      tokenizer: from text to ids and back.
      chat_template: Jinja template of conversations; None if there is none.
      begin_of_text: id that every text starts with; None if there is none.
      begin_text: the begin-of-text token as text, which templates may write even if
        texts do not start with it; empty if there is none.
      end_tokens: ids that end a text; the first one is written.
      generation: options of decoding that come with the model.
      tool_template: the template of conversations with tools, if it is another one.
      special_texts: texts of special tokens by their names, which templates may write.
    """

    config: TransformerConfig
    layout: Mapping[Path, Origin]
    tensors: Tensors
    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    begin_of_text: int | None
    begin_text: str
    end_tokens: tuple[int, ...]
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tool_template: str | None = None
    special_texts: Mapping[str, str | list[str]] = dataclasses.field(
        default_factory=dict
    )


def other_formats() -> types.ModuleType:
    """The package that reads the files of other programs.

    No file of the core imports it otherwise, so that it can be left out.
    """
    return importlib.import_module("bpd_jax.formats")


def load_trunk(
    config: TransformerConfig,
    layout: Mapping[Path, Origin],
    tensors: Tensors,
    mesh: Mesh | None = None,
    *,
    stored: bool = False,
) -> Params:
    """Reads the parameters of a model without block heads, each device its own shards.

    At any time, the host's memory contains one tensor of the checkpoint and a copy of
    the part that a device gets.

    Args:
      config: configuration of the trunk; parameters have its `param_dtype`.
      layout: location of each parameter.
      tensors: the tensors of the checkpoint.
      mesh: devices that share the parameters; None for the first device.
      stored: whether quantized matrices stay so, for decoding; others are expanded.
    """
    shapes = abstract_parameters(BlockwiseConfig(config), mesh)
    total = len(jax.tree.leaves(shapes))
    with progress.bar(label="loading", total=total, unit="tensor") as bar:

        def load(path: Any, leaf: Any) -> Any:
            # The first key is `trunk`, which a model with heads has too.
            name = tuple(entry.key for entry in path[1:])
            origin, matrix = layout[name], None
            if stored and name[-1] in _MATRICES:
                matrix = tensors.read_quantized(origin.name)
            if matrix is None:
                values = origin.convert(read_tensor(tensors, origin))
                assert values.shape == leaf.shape, (origin, values.shape, leaf.shape)
                loaded: Any = jax.make_array_from_callback(
                    leaf.shape,
                    leaf.sharding,
                    lambda index: _copied(values[index], leaf.dtype),
                )
            elif name[-1] == _KERNEL:
                rows = matrix.rows(_rows(origin, name[-2], len(matrix)))
                summed = summed_axes(name[-2], leaf.shape)
                loaded = Packed(rows.placed(leaf.sharding, summed), leaf.shape)
            else:
                loaded = matrix.placed(leaf.sharding, summed=0)
            bar.update()
            return jax.block_until_ready(loaded)

        return jax.tree_util.tree_map_with_path(load, shapes)


def _rows(origin: Origin, module: str, count: int) -> slice:
    """The rows of a tensor `[output, input]` that are a module's kernel."""
    numbers = np.broadcast_to(np.arange(count)[:, None], origin.shape)
    rows = kernel_rows(module, origin.convert(numbers))[:, 0]
    return slice(int(rows[0]), int(rows[-1]) + 1)


def read_tensor(tensors: Tensors, origin: Origin) -> np.ndarray:
    """Returns a tensor as it is stored."""
    if origin.experts is not None:
        return np.stack([read_tensor(tensors, part) for part in origin.parts])
    tensor = tensors.read(origin.name)
    origin.check_shape(tensor.shape)
    return tensor


def _copied(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy in row-major order; always a copy, because a device may keep the array.

    Several rows are copied at a time: the rows of a transposed matrix are columns, so
    every cache line is read once, not once for each of its numbers.
    """
    copy = np.empty(values.shape, dtype)
    for begin in range(0, len(values), _ROWS):
        copy[begin : begin + _ROWS] = values[begin : begin + _ROWS]
    return copy
