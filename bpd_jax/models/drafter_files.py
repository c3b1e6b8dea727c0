"""A trained block drafter on disk: `drafter.json` and `drafter.safetensors`.

Like heads (`heads_files`) it belongs to one model and names it by its fingerprint. The
rows of the model's softmax are not stored. Tensors are named by their path in the
parameters, such as `attention_0/query/kernel`; see `block_drafter`.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bpd_jax import folders
from bpd_jax.errors import UserError
from bpd_jax.models.config import BlockwiseConfig, TransformerConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import (
    FROZEN,
    DrafterFunctions,
    with_softmax,
)
from bpd_jax.models.heads import softmax_rows
from bpd_jax.models.heads_files import (
    DTYPES,
    SCALE,
    check_vocabulary,
    fingerprint,
    packed,
    unpacked,
)
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.typing import Params

FORMAT = 1
HEADER, TENSORS = "drafter.json", "drafter.safetensors"
VOCABULARY = "vocabulary"
SOFTMAX = "softmax"

KIND = folders.FolderKind("a block drafter", HEADER, (TENSORS,), '"base_name"')

_REMEDY = "train it again, or get the folder again"


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedDrafter:
    """A trained block drafter.

    Attributes:
      config: its sizes, none of them None but `window` and `draft_vocabulary`.
      tensors: its trained parameters and draft vocabulary by name, on the host; also
        `softmax`, if it has one of its own (only of imported drafters).
      base: fingerprint of the model that it belongs to.
      base_name: its name, for messages.
      d_model: D of it.
      vocab_size: V of it.
      facts: how it was trained and what it reaches: what JSON can hold.
      folder: where it was read from, for messages.
      identity: tells it from others: 16 hexadecimal digits.
    """

    config: BlockDrafterConfig
    tensors: dict[str, np.ndarray]
    base: str
    base_name: str
    d_model: int
    vocab_size: int
    facts: dict[str, Any]
    folder: pathlib.Path
    identity: str


def save_drafter(
    folder: str | os.PathLike[str],
    config: BlockDrafterConfig,
    params: Params,
    *,
    base: str,
    base_name: str,
    d_model: int,
    vocab_size: int,
    facts: Mapping[str, Any],
    dtype: str = "bfloat16",
) -> None:
    """Writes a block drafter; the folder appears as a whole or not at all.

    Args:
      folder: to write; an older one is replaced.
      config: sizes, resolved for the model.
      params: trained parameters, and `vocabulary` if there is one.
      base: fingerprint of the model that it belongs to.
      base_name: its name, for messages.
      d_model: D of it.
      vocab_size: V of it.
      facts: see `LoadedDrafter`.
      dtype: to store it in: bfloat16, float32, or int8, where every output channel of
        a matrix has its own scale and vectors are bfloat16.

    Raises:
      UserError: the precision is unknown, or the folder cannot be written.
    """
    if dtype not in DTYPES:
        raise UserError(
            f"a block drafter is stored in one of {', '.join(DTYPES)}, not {dtype!r}."
        )
    about = {
        "format": FORMAT,
        "base": base,
        "base_name": base_name,
        "d_model": d_model,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "config": dataclasses.asdict(config),
        "facts": dict(facts),
    }
    tensors: dict[str, np.ndarray] = {}
    for name, value in _named(jax.device_get(params)).items():
        if name == VOCABULARY:
            tensors[name] = np.asarray(value, np.int32)
        else:
            array = np.asarray(value, np.float32)
            tensors |= packed(name, array, dtype, _inputs(name, array.ndim))
    with folders.replacing_folder(folder, KIND) as temporary:
        save_file(tensors, temporary / TENSORS)
        text = json.dumps(about, indent=2) + "\n"
        (temporary / HEADER).write_text(text, encoding="utf-8")


def load_drafter(folder: str | os.PathLike[str]) -> LoadedDrafter:
    """Reads what `save_drafter` wrote.

    Raises:
      UserError: the folder is missing, damaged, or holds no block drafter.
    """
    folder = pathlib.Path(folder)
    about = _read_header(folder / HEADER)
    path = folder / TENSORS
    try:
        stored = load_file(path)
        with path.open("rb") as file:
            identity = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path} ({error}): {_REMEDY}.") from error
    config: BlockDrafterConfig = about["config"]
    shapes = {name: leaf.shape for name, leaf in _shapes(config, about).items()}
    tensors = {
        name: tensor
        if name == VOCABULARY
        else unpacked(name, stored, _inputs(name, tensor.ndim))
        for name, tensor in stored.items()
        if not name.endswith(SCALE)
    }
    for name in sorted(shapes.keys() | tensors.keys()):
        found = tensors[name].shape if name in tensors else "missing"
        if found != shapes.get(name):
            raise UserError(
                f"{path} does not fit {HEADER}: {name} is {found} and not "
                f"{shapes.get(name, 'expected')}: {_REMEDY}."
            )
    if VOCABULARY in tensors:
        check_vocabulary(path, tensors[VOCABULARY], about["vocab_size"])
    return LoadedDrafter(**about, tensors=tensors, folder=folder, identity=identity)


def attach_drafter(
    model: BlockwiseConfig,
    params: Params,
    drafter: LoadedDrafter,
    *,
    name: str = "this model",
    check: bool = True,
) -> tuple[DrafterFunctions, Params]:
    """Makes a loaded block drafter ready for decoding with a model.

    Args:
      model: the target.
      params: of it; without a draft vocabulary its softmax is shared with the result.
      drafter: to attach, in the target's `param_dtype`.
      name: of the target, for messages.
      check: whether a drafter of another model of the same sizes is refused. Its drafts
        are worse, but texts stay the same.

    Returns:
      Functions, and parameters with the softmax.

    Raises:
      UserError: the drafter belongs to another model.
    """
    trunk = model.trunk
    remedy = f"train one for {name}, or give another folder than {drafter.folder}."
    if (drafter.d_model, drafter.vocab_size) != (trunk.d_model, trunk.vocab_size):
        raise UserError(
            f"the block drafter in {drafter.folder} belongs to {drafter.base_name}, of "
            f"width {drafter.d_model} and {drafter.vocab_size} tokens, and {name} has "
            f"width {trunk.d_model} and {trunk.vocab_size} tokens: {remedy}"
        )
    found = fingerprint(model, params)
    if check and found != drafter.base:
        raise UserError(
            f"the block drafter in {drafter.folder} was trained on {drafter.base_name} "
            f"({drafter.base}), and {name} ({found}) is another model: {remedy}"
        )
    functions = DrafterFunctions(drafter.config.resolve(trunk), trunk)
    trained: dict[str, Any] = {}
    for path, value in drafter.tensors.items():
        if path in FROZEN:
            continue
        *parents, last = path.split("/")
        node = trained
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = jnp.asarray(value, trunk.param_dtype)
    softmax = softmax_rows(model, params, None)
    vocabulary = drafter.tensors.get(VOCABULARY)
    attached = with_softmax(trained, softmax, vocabulary)
    if SOFTMAX in drafter.tensors:
        attached[SOFTMAX] = jnp.asarray(drafter.tensors[SOFTMAX], trunk.param_dtype)
    return functions, attached


def _named(params: Params) -> dict[str, Any]:
    """Leaves by their path, such as `fusion/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(entry.key for entry in path): leaf for path, leaf in leaves}


def _inputs(name: str, axes: int) -> tuple[int, ...]:
    """The axes of a matrix that a product sums over."""
    if name.startswith("markov/"):
        return (-1,)
    return (0, 1) if axes == 3 and name.endswith("output/kernel") else (0,)


def _shapes(config: BlockDrafterConfig, about: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes of all tensors of a drafter, whatever model it belongs to."""
    # Of the target only its width and vocabulary matter here.
    target = TransformerConfig(
        vocab_size=about["vocab_size"],
        num_layers=1 + max(config.feature_layers),
        d_model=about["d_model"],
        d_ff=1,
        num_heads=1,
        rotary=config.rotary,
    )
    functions = DrafterFunctions(config, target)
    shapes = _named(jax.eval_shape(functions.init, jax.random.key(0)))
    if config.draft_vocabulary is not None:
        shapes[VOCABULARY] = np.zeros(config.draft_vocabulary, np.int32)
    return shapes


def _read_header(path: pathlib.Path) -> dict[str, Any]:
    """The fields of a `LoadedDrafter`, tensors aside."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path.parent} holds no block drafter: {path} is missing."
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}): {_REMEDY}.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise UserError(f"{path} is not of format {FORMAT}: {_REMEDY}.")
    try:
        fields = dict(about["config"])
        fields["rotary"] = RotaryConfig(**fields["rotary"])
        return {
            "config": BlockDrafterConfig(**fields),
            "base": str(about["base"]),
            "base_name": str(about["base_name"]),
            "d_model": int(about["d_model"]),
            "vocab_size": int(about["vocab_size"]),
            "facts": dict(about["facts"]),
        }
    except (KeyError, TypeError, ValueError, UserError) as error:
        raise UserError(
            f"{path} describes no block drafter ({error}): {_REMEDY}."
        ) from error
