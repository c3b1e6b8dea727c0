"""Imports Medusa heads as block heads.

In both layouts of Medusa heads (Cai et al. 2024), heads count from 0, and head i
predicts the token i + 2 steps ahead. In bpd_jax heads count from 1, and head 1 is the
model itself, so their head i is head i + 2 here. Its state is x after layers x ← x +
SiLU(W x + b), where W is stored as [out, in], here as [in, out]; its logits are the
product with the rows of a softmax matrix.

FasterDecoding, who first published such heads, use two versions. In the first every
head has its own softmax; in the second all heads use the model's softmax, which is not
stored. Their later checkpoints contain base and heads together, with names that begin
with `medusa_head.`. vLLM can share one softmax as well, but reads it from the file
(`original_lm_head` in config.json), and supports draft vocabularies (`token_map`).
"""

import os
import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.formats.json_files import CONFIG, Fields
from bpd_jax.formats.safetensors_files import SafetensorsFiles
from bpd_jax.models.attachments import check_finite
from bpd_jax.models.blockwise_config import BlockHeadsConfig
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.storage.paths import as_path


class Layout(NamedTuple):
    """Names of one layout, where heads and layers count from 0.

    Attributes:
      layer: names of a layer's tensors: head, layer, and `weight` or `bias`.
      softmax: names of a head's softmax: head, and number of layers.
    """

    layer: str
    softmax: str


VLLM = Layout("blocks.{0}.layers.{1}.{2}", "lm_heads.{0}.weight")
MEDUSA = Layout("{0}.{1}.linear.{2}", "{0}.{1}.weight")
LAYOUTS = (VLLM, MEDUSA)

TOKEN_MAP = "token_map"
_PREFIXES = ("medusa_head.", "medusa_heads.")
_CONVERT = (
    "import torch, safetensors.torch as s; tensors = torch.load('medusa_lm_head.pt', "
    "map_location='cpu', weights_only=True); s.save_file({name: tensor.contiguous() "
    "for name, tensor in tensors.items()}, 'medusa_lm_head.safetensors')"
)


def import_heads(
    folder: str | os.PathLike[str], trunk: TransformerConfig
) -> tuple[BlockHeadsConfig, dict[str, np.ndarray]]:
    """Reads Medusa heads, or a complete model with heads, in any of the layouts.

    Heads and layers are counted from the tensors, because published config.json files
    are incomplete. A softmax that equals the base's (`original_lm_head`) is ignored:
    the base's own is used.

    Returns the configuration and the parameters for `save_heads`, float32.
    """
    source = _HeadsFolder(as_path(folder))
    layout, heads, layers = source.layout, source.heads, source.layers
    width = trunk.d_model

    def stacked(part: str, *shape: int) -> np.ndarray:
        stack = np.empty((heads, layers, *shape), np.float32)
        for head, layer in np.ndindex(heads, layers):
            name = layout.layer.format(head, layer, part)
            stack[head, layer] = source.read(name, shape)
        return stack

    kernel = stacked("weight", width, width).swapaxes(-1, -2)
    params = {"kernel": np.ascontiguousarray(kernel)}
    if layout.layer.format(0, 0, "bias") in source.names:
        params["bias"] = stacked("bias", width)
    else:
        params["bias"] = np.zeros((heads, layers, width), np.float32)

    vocabulary = source.vocabulary(trunk.vocab_size)
    if vocabulary is not None:
        params["vocabulary"] = vocabulary
    softmax = source.softmax(width, trunk.vocab_size, vocabulary)
    if softmax is not None:
        params["softmax"] = softmax
    check_finite(params, folder)
    config = BlockHeadsConfig(
        num_heads=heads + 1,
        kind="medusa",
        layers=layers,
        own_softmax=softmax is not None,
        draft_vocabulary=None if vocabulary is None else len(vocabulary),
    )
    return config, params


class _HeadsFolder:
    """The tensors of a folder of Medusa heads, by the names of their layout.

    Attributes:
      names: maps names without a prefix to those in the files; only those of heads, if
        some have the prefix.
      layout: the layout of the names.
      heads: number of heads.
      layers: layers of each head.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder with Medusa heads.")
        self._files = SafetensorsFiles(folder, sorted(folder.glob("*.safetensors")))
        names = self._files.names
        prefixed = {
            name.removeprefix(prefix): name
            for name in names
            for prefix in _PREFIXES
            if name.startswith(prefix)
        }
        self.names = prefixed or {name: name for name in names}
        for layout in LAYOUTS:
            if numbers := _numbered(layout, self.names):
                break
        else:
            raise _no_heads(folder)
        self.layout = layout
        self.heads, self.layers = (1 + max(each) for each in zip(*numbers, strict=True))
        self._settings = Fields.read(folder / CONFIG, optional=True)
        if self._settings.number("logit_scale", 1.0) != 1:
            source = self._settings.source
            raise UserError(f"{source} scales the logits, which is not supported.")

    def read(self, name: str, *shapes: tuple[int, ...]) -> np.ndarray:
        """A tensor that has one of these shapes."""
        if name not in self.names:
            raise UserError(
                f"{self._folder} is incomplete: {self.heads} heads of {self.layers} "
                f"layers need a tensor {name}."
            )
        shape = self._files.shape(self.names[name])
        if shape not in shapes:
            raise UserError(
                f"{name} of {self._folder} has shape {list(shape)} and not "
                f"{' or '.join(str(list(shape)) for shape in shapes)}: these heads "
                "belong to another model."
            )
        return self._files.read(self.names[name])

    def vocabulary(self, vocab_size: int) -> np.ndarray | None:
        """The ids of a draft vocabulary, `[V']` int32, if there is one."""
        if TOKEN_MAP not in self.names or self.layout is not VLLM:
            return None
        stored = self._settings.integer("vocab_size", vocab_size)
        # As in vLLM, which ignores the map otherwise.
        if self._settings.integer("truncated_vocab_size", stored) >= stored:
            return None
        ids = self._files.read_integers(self.names[TOKEN_MAP])
        if (
            ids.ndim != 1
            or not len(ids)
            or not 0 <= ids.min() <= ids.max() < vocab_size
            or len(np.unique(ids)) != len(ids)
        ):
            raise UserError(
                f"{TOKEN_MAP} of {self._folder} is not a list of different tokens "
                f"below {vocab_size}: it is damaged, or of another model."
            )
        return ids.astype(np.int32)

    def softmax(
        self, width: int, vocab_size: int, vocabulary: np.ndarray | None
    ) -> np.ndarray | None:
        """A softmax matrix per head, `[heads, V', D]`; None if the base's is used."""
        pattern = self.layout.softmax
        names = [pattern.format(head, self.layers) for head in range(self.heads)]
        rows = vocab_size if vocabulary is None else len(vocabulary)
        # If all rows are stored, vLLM selects those of the draft vocabulary.
        shapes = {(rows, width), (vocab_size, width)}
        if self._settings.flag("original_lm_head", False):
            if names[0] in self.names:
                self.read(names[0], *shapes)
            return None
        if not any(name in self.names for name in names):
            return None
        # The largest tensors are filled in place, not stacked.
        matrices = np.empty((self.heads, rows, width), np.float32)
        for head, name in enumerate(names):
            matrix = self.read(name, *shapes)
            matrices[head] = matrix if len(matrix) == rows else matrix[vocabulary]
        return matrices


def _no_heads(folder: pathlib.Path) -> UserError:
    if any((*folder.glob("*.pt"), *folder.glob("*.bin"))):
        return UserError(
            f"{folder} has its heads as pickled PyTorch files, which can run code and "
            f"are not read; convert them where torch is installed: {_CONVERT}"
        )
    names = [layout.layer.format(0, 0, "weight") for layout in LAYOUTS]
    return UserError(
        f"{folder} contains no Medusa heads: no tensor {' or '.join(names)}."
    )


def _numbered(layout: Layout, names: Iterable[str]) -> set[tuple[int, int]]:
    """The pairs of head and layer in the names of tensors."""
    number = r"(\d{1,4})"
    pattern = layout.layer.replace(".", r"\.").format(number, number, "(?:weight|bias)")
    matches = (re.fullmatch(pattern, name, re.ASCII) for name in names)
    return {(int(match[1]), int(match[2])) for match in matches if match}
