"""Attachments: modules that are trained for a frozen model and stored separately.

Block heads and block drafters are attachments. Each is a folder with a JSON header and
a safetensors file. The header identifies the model by its `fingerprint`. Rows of the
model's softmax are not stored.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import traverse_util

from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import check_shapes
from bpd_jax.base.typing import Params
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.device_ops import on_cpu
from bpd_jax.models.partitioning import on_host
from bpd_jax.models.products import Packed, is_stored
from bpd_jax.models.quantized import expanded
from bpd_jax.models.stored_tensors import (
    lowered,
    raised,
    read_tensors,
    write_tensors,
)
from bpd_jax.storage.folders import Artifact, replacing_folder
from bpd_jax.storage.paths import as_path

Config = TypeVar("Config")

VOCABULARY = "vocabulary"

# Number of values of a fingerprint from each end of a row.
_SAMPLE = 32


class About(TypedDict):
    """The fields of the header of an attachment besides its configuration.

    They are the fingerprint of the model that it belongs to, its name for messages, D
    and V, and settings and results of the training, as JSON.
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
      tensors: its trained parameters by path, such as `fusion/kernel`, and its draft
        vocabulary, on the host; float32 if they were stored by `AttachmentFiles.save`.
      base, base_name, d_model, vocab_size, facts: see `About`.
      folder: folder that it was read from, for messages.
      identity: a digest of its tensors, 16 hexadecimal digits.
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
        base: str,
        name: str,
        remedy: str,
    ) -> None:
        """Checks that the attachment belongs to the model of `base`.

        `title`, such as "a block drafter", `name` and `remedy` are for messages.
        """
        trunk = model.trunk
        if (self.d_model, self.vocab_size) != (trunk.d_model, trunk.vocab_size):
            raise UserError(
                f"{self.folder} holds {title} trained on {self.base_name}, of width "
                f"{self.d_model} and {self.vocab_size} tokens, and {name} has width "
                f"{trunk.d_model} and {trunk.vocab_size} tokens: {remedy}"
            )
        if base != self.base:
            raise UserError(
                f"{self.folder} holds {title} trained on {self.base_name} "
                f"({self.base}), and {name} ({base}) is another model: {remedy}"
            )


@dataclasses.dataclass(frozen=True)
class AttachmentFiles(Generic[Config]):
    """Reads and writes attachments of one kind.

    Attributes:
      tensors: name of the safetensors file.
      read_config: creates the configuration from JSON; raises if it is damaged.
      shapes: returns the shapes of the stored tensors by path, from the configuration,
        D and V; configurations that are never stored are refused.
      inputs: returns the axes of a matrix that products sum over, from its path and its
        number of axes; see `lowered`.
    """

    kind: Artifact
    tensors: str
    read_config: Callable[[dict[str, Any]], Config]
    shapes: Callable[[Config, int, int], Mapping[str, tuple[int, ...]]]
    inputs: Callable[[str, int], tuple[int, ...]]

    def save(
        self,
        folder: str | os.PathLike[str],
        config: Config,
        params: Params,
        *,
        dtype: str = "bfloat16",
        **about: Unpack[About],
    ) -> None:
        """Writes an attachment atomically.

        An existing folder is replaced. `dtype` is one of `STORED_DTYPES`; see
        `lowered`.

        Args:
          config: configuration; that of a block drafter is resolved for the model.
          params: parameters, of which the trained ones are stored, and `vocabulary` if
            there is one.
        """
        stored = self.shapes(config, about["d_model"], about["vocab_size"])
        leaves = by_path(params)
        tensors: dict[str, np.ndarray] = {}
        for name, value in jax.device_get({x: leaves[x] for x in stored}).items():
            tensors |= lowered(name, value, dtype, self.inputs(name, value.ndim))
        fields: Any = config
        header: dict[str, Any] = {**about}
        facts = dict(header.pop("facts"))
        header |= {"dtype": dtype, "config": dataclasses.asdict(fields), "facts": facts}
        with replacing_folder(folder, self.kind) as temporary:
            packed = dtype == "compact"
            write_tensors(temporary / self.tensors, tensors, packed=packed)
            self.kind.write_header(temporary, header)

    def load(self, folder: str | os.PathLike[str]) -> Attachment[Config]:
        """Reads what `save` wrote."""
        folder = as_path(folder)
        sizes = {"d_model": int, "vocab_size": int}
        rest = {"base": str, "base_name": str, "config": dict, "facts": dict}
        header = self.kind.read_header(folder, {**sizes, **rest})
        with self.kind.reading(folder / self.kind.marker):
            config = self.read_config(header["config"])
            shapes = self.shapes(config, header["d_model"], header["vocab_size"])
        path = folder / self.tensors
        with self.kind.reading(path):
            stored, identity = read_tensors(path)
            tensors = raised(stored)
            check_shapes(tensors, shapes)
            if VOCABULARY in tensors:
                check_vocabulary(tensors[VOCABULARY], header["vocab_size"])
        check_finite(tensors, path)
        names = (*sizes, "base", "base_name", "facts")
        return Attachment(
            config=config,
            tensors=tensors,
            folder=folder,
            identity=identity,
            **{name: header[name] for name in names},
        )


def check_finite(
    tensors: Mapping[str, np.ndarray], folder: str | os.PathLike[str]
) -> None:
    """Checks that all numbers are finite."""
    for name, tensor in tensors.items():
        if not np.isfinite(np.asarray(tensor)).all():
            raise UserError(
                f"{folder}: the parameter {name} is not finite: train again, or get "
                "the folder again."
            )


def check_vocabulary(ids: np.ndarray, vocab_size: int) -> None:
    """Raises a `ValueError` unless `ids` are distinct tokens of a vocabulary."""
    inside = 0 <= ids.min() <= ids.max() < vocab_size
    if ids.dtype != np.int32 or not inside or len(np.unique(ids)) != len(ids):
        raise ValueError(
            f"its draft vocabulary must consist of distinct tokens below {vocab_size}"
        )


def fingerprint(model: BlockwiseConfig, params: Params) -> str:
    """Identifies a trained trunk by 16 hexadecimal digits.

    It depends on the fields of the trunk's configuration that differ from the default
    (so that new fields do not change it), except precisions and `max_length`, and on
    the first and last 32 values of the first and last row of every tensor, rounded to
    bfloat16. It is cheap for models of any size, and equal for parameters in float32
    and bfloat16, but different for a quantised model.
    """
    about = _not_default(model.trunk)
    for name in ("dtype", "param_dtype", "max_length"):
        about.pop(name, None)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())

    def in_place(leaf: Any) -> Any:
        # On a CPU numpy reads it in place; elsewhere only its ends are copied.
        local = on_cpu() and getattr(leaf, "is_fully_addressable", True)
        return np.asarray(leaf) if local else leaf

    leaves = jax.tree_util.tree_leaves_with_path(
        jax.tree.map(in_place, params["trunk"]),
        is_leaf=lambda leaf: isinstance(leaf, Packed) or is_stored(leaf),
    )
    for path, leaf in leaves:
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape}".encode())
    ends = on_host([_ends(leaf) for _, leaf in leaves])
    for (_, leaf), (first, last) in zip(leaves, expanded(ends), strict=True):
        if isinstance(leaf, Packed):
            # The rows of the kernel are columns of the packed one.
            first, last = first[:, 0], last[:, -1]
        for sample in first.ravel()[:_SAMPLE], last.ravel()[-_SAMPLE:]:
            digest.update(np.asarray(sample).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()[:16]


def _ends(leaf: Any) -> tuple[Any, Any]:
    """The parts of a parameter that hold the values of its fingerprint."""
    if isinstance(leaf, Packed):
        count = min(_SAMPLE, leaf.shape[-1])
        return tuple(
            jax.tree.map(lambda array, part=part: array[part], leaf.rows)
            for part in (slice(count), slice(-count, None))
        )
    if is_stored(leaf):
        return leaf.rows(slice(1)), leaf.rows(slice(-1, None))
    first, last = ((end,) * (leaf.ndim - 1) for end in (0, -1))
    return leaf[first][:_SAMPLE], leaf[last][-_SAMPLE:]


def _not_default(config: Any) -> dict[str, Any]:
    fields = (
        (f.name, getattr(config, f.name), f.default) for f in dataclasses.fields(config)
    )
    return {
        name: _not_default(value) if dataclasses.is_dataclass(value) else value
        for name, value, default in fields
        if value != default
    }


def nested(leaves: Mapping[str, np.ndarray], dtype: str) -> Params:
    """The inverse of `by_path`."""
    tree = traverse_util.unflatten_dict(dict(leaves), sep="/")
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def by_path(tree: Params) -> dict[str, Any]:
    """Leaves by path, such as `fusion/kernel`, in tree order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
