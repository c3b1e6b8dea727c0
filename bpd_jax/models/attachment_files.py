"""Block heads, block drafters and refiners on disk, and attached to a model.

Heads and drafters are `attachments`. Tensors of a drafter are named by their path in
the parameters, such as `attention_0/query/kernel`; see `block_drafter`. An imported
drafter may have its own `softmax`.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import ArraySpec, read_npz
from bpd_jax.base.typing import Params
from bpd_jax.models.attachments import (
    VOCABULARY,
    Attachment,
    AttachmentFiles,
    by_path,
    check_finite,
    fingerprint,
    nested,
)
from bpd_jax.models.block_drafter import FROZEN, with_softmax
from bpd_jax.models.block_heads import head_shapes, is_trained, softmax_rows
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.parameters import abstract_parameters
from bpd_jax.models.partitioning import placed
from bpd_jax.models.trained_refiners import MarkovConfig
from bpd_jax.models.transformer_config import TransformerConfig, from_fields
from bpd_jax.storage import files
from bpd_jax.storage.folders import Artifact, replacing_folder
from bpd_jax.storage.paths import as_path, local_copy

LoadedHeads: TypeAlias = Attachment[BlockHeadsConfig]

_HEADS = "heads.safetensors"
HEADS_KIND = Artifact(
    "block heads",
    "heads.json",
    (_HEADS,),
    '"base_name"',
    remedy="train them again, or get the folder again",
)


def attach_heads(
    model: BlockwiseConfig,
    params: Params,
    heads: LoadedHeads,
    *,
    name: str = "this model",
    base: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[BlockwiseConfig, Params]:
    """Attaches trained heads to a model, in its `param_dtype`, replacing its own.

    The result shares the model's arrays. `base` is its fingerprint, which is computed
    if it is None.
    """
    remedy = (
        f"train heads for {name}, give other heads with --heads, or remove "
        f"{heads.folder}."
    )
    base = base or fingerprint(model, params)
    heads.check_base(HEADS_KIND.title, model, base, name, remedy)
    config = dataclasses.replace(model, heads=heads.config)
    shapes = abstract_parameters(config, mesh)["heads"]
    attached = {
        key: placed(np.asarray(value, shapes[key].dtype), shapes[key].sharding)
        for key, value in heads.tensors.items()
    }
    if heads.config.has_softmax and not heads.config.own_softmax:
        attached["softmax"] = softmax_rows(model, params, attached[VOCABULARY])
    return config, {"trunk": params["trunk"], "heads": attached}


def _heads_shapes(
    config: BlockHeadsConfig, d_model: int, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    if config.first_has_ffn:
        raise UserError(
            "heads with first_has_ffn would change head 1, which is the model itself, "
            "and all decoded texts: train heads without it."
        )
    shapes = head_shapes(config, d_model, vocab_size)
    return {
        name: shape
        for name, shape in shapes.items()
        if name == VOCABULARY or is_trained(config, name)
    }


HEADS_FILES = AttachmentFiles(
    HEADS_KIND,
    _HEADS,
    lambda fields: BlockHeadsConfig(**fields),
    _heads_shapes,
    lambda name, axes: (-1 if name == "softmax" else -2,),
)
# Parameters are `params["heads"]` of a model.
save_heads, load_heads = HEADS_FILES.save, HEADS_FILES.load


LoadedDrafter: TypeAlias = Attachment[BlockDrafterConfig]

SOFTMAX = "softmax"
_DRAFTER = "drafter.safetensors"
DRAFTER_KIND = Artifact(
    "a block drafter",
    "drafter.json",
    (_DRAFTER,),
    '"base_name"',
    remedy="train it again, or get the folder again",
)


def attach_drafter(
    model: BlockwiseConfig,
    params: Params,
    drafter: LoadedDrafter,
    *,
    name: str = "this model",
    base: str | None = None,
) -> tuple[DrafterFunctions, Params]:
    """Attaches a block drafter, in the `param_dtype` of its target model.

    Without a draft vocabulary, it shares the target's softmax. `base` is the target's
    fingerprint; if it is None it is computed from `params`, which then have the layout
    in which they were stored.
    """
    trunk = model.trunk
    remedy = f"train one for {name}, or give a folder other than {drafter.folder}."
    base = base or fingerprint(model, params)
    drafter.check_base(DRAFTER_KIND.title, model, base, name, remedy)
    functions = DrafterFunctions(drafter.config.resolve(trunk), trunk)
    stored = {k: value for k, value in drafter.tensors.items() if k not in FROZEN}
    trained = nested(stored, trunk.param_dtype)
    softmax = softmax_rows(model, params, None)
    vocabulary = drafter.tensors.get(VOCABULARY)
    attached = with_softmax(trained, softmax, vocabulary)
    if SOFTMAX in drafter.tensors:
        attached[SOFTMAX] = jnp.asarray(drafter.tensors[SOFTMAX], trunk.param_dtype)
    return functions, attached


def _drafter_shapes(
    config: BlockDrafterConfig, d_model: int, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    # They depend only on the width and the vocabulary of the target.
    target = TransformerConfig(
        vocab_size=vocab_size,
        num_layers=1 + max(config.feature_layers),
        d_model=d_model,
        d_ff=1,
        num_heads=1,
        rotary=config.rotary,
    )
    functions = DrafterFunctions(config, target)
    leaves = by_path(jax.eval_shape(functions.init, jax.random.key(0)))
    shapes: dict[str, tuple[int, ...]] = {k: leaf.shape for k, leaf in leaves.items()}
    if config.draft_vocabulary is not None:
        shapes[VOCABULARY] = (config.draft_vocabulary,)
    return shapes


def _drafter_inputs(name: str, axes: int) -> tuple[int, ...]:
    if name in ("markov/embedding", "markov/output"):
        return (-1,)
    return (0, 1) if axes == 3 and name.endswith("output/kernel") else (0,)


DRAFTER_FILES = AttachmentFiles(
    DRAFTER_KIND,
    _DRAFTER,
    functools.partial(from_fields, BlockDrafterConfig),
    _drafter_shapes,
    _drafter_inputs,
)
save_drafter, load_drafter = DRAFTER_FILES.save, DRAFTER_FILES.load


_REFINER = "params.npz"
# The kind in the header of a refiner, the name of its folder in that of its run.
MARKOV = "markov"
REFINER_KIND = Artifact(
    "a refiner",
    "refiner.json",
    # Earlier versions also wrote the log of the training here.
    (_REFINER, "metrics.jsonl"),
    '"config"',
    remedy="train one with gin_configs/runs/refiner.gin",
)


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedRefiner:
    """A trained refiner.

    Attributes:
      facts: settings and results of its training, as JSON.
      base: fingerprint of the model that it was trained on (`attachments`), or None if
        unknown.
    """

    config: MarkovConfig
    params: Params
    facts: dict[str, Any]
    base: str | None = None


def save_refiner(
    folder: str | os.PathLike[str],
    config: MarkovConfig,
    params: Params,
    facts: Mapping[str, Any],
    base: str | None = None,
) -> None:
    """Writes a refiner atomically; for `facts` and `base` see `LoadedRefiner`."""
    header = {
        "kind": MARKOV,
        "base": base,
        "config": dataclasses.asdict(config),
        "facts": dict(facts),
    }
    with replacing_folder(folder, REFINER_KIND) as temporary:
        files.write_npz(temporary / _REFINER, jax.device_get(by_path(params)))
        REFINER_KIND.write_header(temporary, header)


def load_refiner(folder: str | os.PathLike[str]) -> LoadedRefiner:
    """Reads what `save_refiner` wrote."""
    folder = as_path(folder)
    header = REFINER_KIND.read_header(
        folder, {"kind": str, "config": dict, "facts": dict}
    )
    with REFINER_KIND.reading(folder / REFINER_KIND.marker):
        if header["kind"] != MARKOV:
            raise ValueError(f"{header['kind']!r} is no kind of refiner")
        config = MarkovConfig(**header["config"])
    path = folder / _REFINER
    with REFINER_KIND.reading(path):
        key = jax.eval_shape(lambda: jax.random.key(0))
        abstract = jax.eval_shape(config.init, key)
        specs = {
            name: ArraySpec((np.dtype(leaf.dtype).str,), tuple(leaf.shape))
            for name, leaf in by_path(abstract).items()
        }
        arrays = read_npz(local_copy(path), specs)
    check_finite(arrays, path)
    leaves = [jnp.asarray(arrays[name]) for name in specs]
    params = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    return LoadedRefiner(config, params, header["facts"], header.get("base"))


def check_fits(
    config: MarkovConfig, *, vocab_size: int, d_model: int, block_size: int
) -> None:
    """Checks that the refiner fits a model of these sizes."""
    trained_sizes = (config.vocab_size, config.d_model, config.num_heads)
    if trained_sizes == (vocab_size, d_model, block_size):
        return

    def sizes(vocab_size: int, d_model: int, block_size: int) -> str:
        return f"{vocab_size} tokens, width {d_model} and {block_size} heads"

    raise UserError(
        f"the refiner belongs to a model of {sizes(*trained_sizes)}, and "
        f"this model has {sizes(vocab_size, d_model, block_size)}: train one for it "
        "with python -m bpd_jax.train and gin_configs/runs/refiner.gin."
    )
