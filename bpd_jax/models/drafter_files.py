"""A trained block drafter on disk: `drafter.json` and `drafter.safetensors`.

Tensors are named by their path in the parameters, such as `attention_0/query/kernel`;
see `block_drafter`. An imported drafter may have its own `softmax`.
"""

import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Params
from bpd_jax.models.attachments import (
    VOCABULARY,
    Attachment,
    AttachmentFiles,
    by_path,
    fingerprint,
    nested,
)
from bpd_jax.models.block_drafter import FROZEN, with_softmax
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.transformer_config import TransformerConfig, from_fields
from bpd_jax.storage.folders import Artifact

LoadedDrafter: TypeAlias = Attachment[BlockDrafterConfig]

HEADER, TENSORS = "drafter.json", "drafter.safetensors"
SOFTMAX = "softmax"
KIND = Artifact(
    "a block drafter",
    HEADER,
    (TENSORS,),
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
    drafter.check_base(KIND.title, model, base, name, remedy)
    functions = DrafterFunctions(drafter.config.resolve(trunk), trunk)
    stored = {k: value for k, value in drafter.tensors.items() if k not in FROZEN}
    trained = nested(stored, trunk.param_dtype)
    softmax = softmax_rows(model, params, None)
    vocabulary = drafter.tensors.get(VOCABULARY)
    attached = with_softmax(trained, softmax, vocabulary)
    if SOFTMAX in drafter.tensors:
        attached[SOFTMAX] = jnp.asarray(drafter.tensors[SOFTMAX], trunk.param_dtype)
    return functions, attached


def _shapes(
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


def _inputs(name: str, axes: int) -> tuple[int, ...]:
    if name in ("markov/embedding", "markov/output"):
        return (-1,)
    return (0, 1) if axes == 3 and name.endswith("output/kernel") else (0,)


_FILES = AttachmentFiles(
    KIND,
    TENSORS,
    functools.partial(from_fields, BlockDrafterConfig),
    _shapes,
    _inputs,
)
save_drafter, load_drafter = _FILES.save, _FILES.load
