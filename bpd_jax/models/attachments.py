"""Attachments: modules trained for one frozen model and stored apart from it.

Block heads and block drafters are attachments. Each is a folder with a JSON header and
a safetensors file. The header names the model by its `fingerprint`. What the model has
already, the rows of its softmax, is not stored.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import jax
import ml_dtypes
import numpy as np

from bpd_jax import array_files
from bpd_jax.artifacts import Artifact, read_tensors
from bpd_jax.buckets import as_path
from bpd_jax.errors import UserError
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.typing import Params

Config = TypeVar("Config")

DTYPES = ("bfloat16", "float32", "int8")
VOCABULARY = "vocabulary"
SCALE = ".scale"

# Values that a fingerprint takes from each end of a row.
_SAMPLE = 32


class About(TypedDict):
    """What the header of an attachment states besides its configuration.

    Attributes:
      base: fingerprint of the model that it belongs to.
      base_name: name of that model, for messages.
      d_model: D of that model.
      vocab_size: V of that model.
      facts: how it was trained and what it reaches: what JSON can hold.
    """

    base: str
    base_name: str
    d_model: int
    vocab_size: int
    facts: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Attachment(Generic[Config]):
    """An attachment that was read from disk.

    Attributes:
      config: its sizes.
      tensors: its trained parameters by path, such as `fusion/kernel`, and its draft
        vocabulary, on the host; float32 if they were stored by this program.
      base, base_name, d_model, vocab_size, facts: see `About`.
      folder: where it was read from, for messages.
      identity: distinguishes it from others: 16 hexadecimal digits.
    """

    config: Config
    tensors: dict[str, np.ndarray]
    base: str
    base_name: str
    d_model: int
    vocab_size: int
    facts: Mapping[str, Any]
    folder: pathlib.Path
    identity: str

    def check_base(
        self,
        title: str,
        model: BlockwiseConfig,
        params: Params,
        name: str,
        remedy: str,
        *,
        check: bool = True,
    ) -> None:
        """Raises a `UserError` unless the attachment belongs to a model.

        Args:
          title: of the attachment, for messages: "a block drafter".
          model: the model.
          params: of it.
          name: of the model, for messages.
          remedy: what to do, for messages.
          check: whether another model of the same sizes is refused too.
        """
        trunk = model.trunk
        if (self.d_model, self.vocab_size) != (trunk.d_model, trunk.vocab_size):
            raise UserError(
                f"{self.folder} holds {title} trained on {self.base_name}, of width "
                f"{self.d_model} and {self.vocab_size} tokens, and {name} has width "
                f"{trunk.d_model} and {trunk.vocab_size} tokens: {remedy}"
            )
        key = fingerprint(model, params) if check else self.base
        if key != self.base:
            raise UserError(
                f"{self.folder} holds {title} trained on {self.base_name} "
                f"({self.base}), and {name} ({key}) is another model: {remedy}"
            )


@dataclasses.dataclass(frozen=True)
class AttachmentFiles(Generic[Config]):
    """How the attachments of one kind are stored.

    Attributes:
      kind: of the folders.
      tensors: name of the safetensors file.
      read_config: makes the configuration from its JSON; raises where it is damaged.
      shapes: shapes of all tensors by path, from the configuration, D and V.
      inputs: from the path of a matrix and its number of axes, the axes that a product
        sums over: int8 has a scale for each channel of the others.
    """

    kind: Artifact
    tensors: str
    read_config: Callable[[dict[str, Any]], Config]
    shapes: Callable[[Config, int, int], Mapping[str, tuple[int, ...]]]
    inputs: Callable[[str, int], tuple[int, ...]]

    def save(
        self,
        folder: str | os.PathLike[str],
        config: Any,
        params: Mapping[str, Any],
        dtype: str,
        **about: Unpack[About],
    ) -> None:
        """Writes an attachment; the folder appears as a whole or not at all.

        Args:
          folder: to write; an older one is replaced.
          config: sizes, a dataclass.
          params: trained parameters, and `vocabulary` if there is one, by path.
          dtype: to store them in: bfloat16, float32, or int8, where each output channel
            of a matrix has its own scale, and biases and vectors are bfloat16.
          **about: see `About`.

        Raises:
          UserError: the precision is unknown, or the folder cannot be written.
        """
        if dtype not in DTYPES:
            raise UserError(
                f"{self.kind.title}: stored in one of {', '.join(DTYPES)}, not in "
                f"{dtype!r}."
            )
        tensors: dict[str, np.ndarray] = {}
        for name, value in jax.device_get(dict(params)).items():
            if name == VOCABULARY:
                tensors[name] = np.asarray(value, np.int32)
            else:
                tensors |= self._packed(name, np.asarray(value, np.float32), dtype)
        header: dict[str, Any] = {**about}
        facts = dict(header.pop("facts"))
        header |= {"dtype": dtype, "config": dataclasses.asdict(config), "facts": facts}
        self.kind.write(folder, header, self.tensors, tensors)

    def load(self, folder: str | os.PathLike[str]) -> Attachment[Config]:
        """Reads what `save` wrote.

        Raises:
          UserError: the folder is missing, damaged, or of another kind.
        """
        folder = as_path(folder)
        sizes = {"d_model": int, "vocab_size": int}
        rest = {"base": str, "base_name": str, "config": dict, "facts": dict}
        header = self.kind.read_header(folder, {**sizes, **rest})
        with self.kind.reading(folder / self.kind.marker):
            config = self.read_config(header["config"])
        path = folder / self.tensors
        with self.kind.reading(path):
            stored, identity = read_tensors(path)
            shapes = self.shapes(config, header["d_model"], header["vocab_size"])
            tensors = {
                name: tensor if name == VOCABULARY else self._unpacked(name, stored)
                for name, tensor in stored.items()
                if not name.endswith(SCALE)
            }
            array_files.check_shapes(tensors, shapes)
            if VOCABULARY in tensors:
                check_vocabulary(tensors[VOCABULARY], header["vocab_size"])
        names = (*sizes, "base", "base_name", "facts")
        return Attachment(
            config=config,
            tensors=tensors,
            folder=folder,
            identity=identity,
            **{name: header[name] for name in names},
        )

    def _packed(
        self, name: str, value: np.ndarray, dtype: str
    ) -> dict[str, np.ndarray]:
        """The tensors that hold one float32 parameter in a precision of `DTYPES`."""
        if dtype == "float32":
            return {name: value}
        if dtype == "bfloat16" or name.startswith("bias") or value.ndim < 2:
            return {name: value.astype(ml_dtypes.bfloat16)}
        axes = self.inputs(name, value.ndim)
        scale = np.abs(value).max(axes, keepdims=True) / 127
        scale = np.where(scale == 0, 1, scale).astype(np.float32)
        return {name: np.rint(value / scale).astype(np.int8), name + SCALE: scale}

    def _unpacked(self, name: str, stored: Mapping[str, np.ndarray]) -> np.ndarray:
        """The inverse of `_packed`, float32, up to rounding."""
        value = stored[name].astype(np.float32)
        if name + SCALE not in stored:
            return value
        scale = stored[name + SCALE]
        if value.ndim < 2:
            raise ValueError(f"{name} has scales but is not a matrix")
        wanted = list(value.shape)
        for axis in self.inputs(name, value.ndim):
            wanted[axis] = 1
        if list(scale.shape) != wanted:
            raise ValueError(
                f"the scales of {name} have shape {list(scale.shape)}, not {wanted}"
            )
        return value * scale


def check_vocabulary(ids: np.ndarray, vocab_size: int) -> None:
    """Raises a `ValueError` unless `ids` are different tokens of a vocabulary."""
    inside = 0 <= ids.min() <= ids.max() < vocab_size
    if ids.dtype != np.int32 or not inside or len(np.unique(ids)) != len(ids):
        raise ValueError(
            "its draft vocabulary does not consist of different tokens below "
            f"{vocab_size}"
        )


def fingerprint(model: BlockwiseConfig, params: Params) -> str:
    """Identifies a trained trunk: 16 hexadecimal digits.

    It depends on the fields of the trunk's configuration that are not the default (so
    that new fields change nothing), without precisions and the length of texts, and on
    the first and the last 32 values of the first and the last row of every tensor,
    rounded to bfloat16. So it is cheap for any size, and the same whether the
    parameters are kept in float32 or in bfloat16. A quantised model has another one.
    """
    about = _not_default(model.trunk)
    for name in ("dtype", "param_dtype", "max_length"):
        about.pop(name, None)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    leaves = jax.tree_util.tree_leaves_with_path(params["trunk"])
    samples = jax.device_get(
        [
            leaf[(end,) * (leaf.ndim - 1)][part]
            for _, leaf in leaves
            for end, part in ((0, slice(_SAMPLE)), (-1, slice(-_SAMPLE, None)))
        ]
    )
    for path, leaf in leaves:
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape}".encode())
    for sample in samples:
        digest.update(np.asarray(sample).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()[:16]


def _not_default(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that do not have their default values."""
    fields = (
        (f.name, getattr(config, f.name), f.default) for f in dataclasses.fields(config)
    )
    return {
        name: _not_default(value) if dataclasses.is_dataclass(value) else value
        for name, value, default in fields
        if value != default
    }


def by_path(params: Params) -> dict[str, Any]:
    """Leaves by the path of their keys, such as `fusion/kernel`, in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(entry.key for entry in path): leaf for path, leaf in leaves}
