"""The layouts of other libraries for block drafters (DFlash, DFlash2, DSpark).

Two layouts are in use, with the same names of tensors:

- that of the library `speculators`, whose config.json has `speculators_model_type`
  (`dflash` or `dspark`) and describes the layers in `transformer_layer_config`;
- that of the authors, whose config.json is that of a Qwen3 model with more fields:
  `dflash_config` in z-lab's DFlash and DFlash2, fields at the top level in DeepSpec's
  DSpark.

They count differently from bpd_jax:

- `block_size` is the number of queries Q. DSpark predicts at the anchor as well
  (`sample_from_anchor`), so L is Q + 1; in DFlash L is Q.
- Layers of the target: `aux_hidden_state_layer_ids` of speculators counts the embedding
  as 0, so id i is layer i - 1 here. `target_layer_ids` counts layers from 0, as here,
  and -1 is the embedding.
- The mask embedding is the embedding of the token `mask_token_id`, in the drafter's own
  `embed_tokens` if there is one, else in the target's. (If that token is the certain
  token, bpd_jax uses the target's embedding.)
- `d2t[i]` of a draft vocabulary is the distance from i to the token id.

Matrices are [output, input]; here they are [input, …, output].
"""

import os
import pathlib
from collections.abc import Mapping

import numpy as np

from bpd_jax.base.errors import UserError, naming
from bpd_jax.base.typing import Array
from bpd_jax.decoding.pretrained_checkpoint import Origin, read_tensor
from bpd_jax.formats.json_files import CONFIG
from bpd_jax.formats.safetensors_files import SafetensorsFiles
from bpd_jax.formats.trunk_layouts import llama_layer
from bpd_jax.models.attachments import check_finite, check_vocabulary
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.partitioning import on_host
from bpd_jax.models.transformer_config import TransformerConfig

TYPE = "speculators_model_type"

EMBEDDING = "embed_tokens.weight"
SOFTMAX = "lm_head.weight"
DRAFT_TO_TARGET = "d2t"
TARGET_IN_DRAFT = "t2d"
CONFIDENCE = "confidence_head.proj.weight"

# Tensors that drafting does not use: targets of training, rotary frequencies.
UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")

# Rows of an embedding or softmax compared at once.
_ROWS = 4096
# Quantisation of the target changes its embeddings by a few percent.
_SAME_EMBEDDING = 0.1


def drafter_layout(
    config: BlockDrafterConfig, target: TransformerConfig
) -> dict[str, Origin]:
    """The tensors of a block drafter, by the paths of its parameters.

    The mask embedding and the frozen parameters are not included.
    """
    layers = config.transformer(target)
    width, rank = layers.d_model, config.markov_rank
    inputs, taps = len(config.feature_layers) * width, config.convolution_taps
    layout = {
        "fusion/kernel": Origin("fc.weight", (width, inputs), np.transpose),
        "fusion_norm/scale": Origin("hidden_norm.weight", (width,)),
        "final_norm/scale": Origin("norm.weight", (width,)),
    }
    for layer in range(config.num_layers):
        for path, origin in llama_layer(layers, layer).items():
            name = origin.name.removeprefix("model.")
            layout["/".join(path)] = Origin(name, origin.shape, origin.convert)
        for part in ("attention", "mlp") if taps else ():
            own, name = f"{part}_convolution_{layer}", f"layers.{layer}.{part}_conv"
            shape = (2 * taps * (width // config.convolution_group), width)
            layout[f"{own}/base"] = Origin(f"{name}.base_kernel", (2, taps, width))
            layout[f"{own}/dynamic/kernel"] = Origin(
                f"{name}.kernel_projection.weight", shape, np.transpose
            )
    if rank:
        outputs = config.draft_vocabulary or target.vocab_size
        head = "markov_head.markov_w{}.weight"
        embedding, output = head.format(1), head.format(2)
        if config.markov_reads_state:
            head = "candidate_selector.{}"
            embedding = head.format("predecessor_codebook")
            output = head.format("successor_codebook")
            layout["markov/project"] = Origin(
                head.format("hidden_projection.weight"), (rank, width), np.transpose
            )
        layout["markov/embedding"] = Origin(embedding, (target.vocab_size, rank))
        layout["markov/output"] = Origin(output, (outputs, rank))
    if config.confidence:
        read = width + (rank if config.confidence_reads_markov else 0)
        layout["confidence/kernel"] = Origin(CONFIDENCE, (1, read), np.transpose)
        layout["confidence/bias"] = Origin("confidence_head.proj.bias", (1,))
    return layout


def check_sizes(
    source: str | os.PathLike[str],
    sizes: tuple[int, int],
    target: TransformerConfig,
    name: str,
) -> None:
    """Checks that width and vocabulary are those of the target."""
    if sizes != (target.d_model, target.vocab_size):
        raise UserError(
            f"{source} is of a drafter for a model of width {sizes[0]} with {sizes[1]} "
            f"tokens, but {name} has width {target.d_model} and {target.vocab_size} "
            f"tokens: give a drafter of {name}."
        )


def read_layout(
    folder: pathlib.Path, tensors: SafetensorsFiles, layout: Mapping[str, Origin]
) -> dict[str, np.ndarray]:
    """The parameters of a drafter by path; a `UserError` for unknown tensors."""
    shared_names = {EMBEDDING, SOFTMAX, DRAFT_TO_TARGET, TARGET_IN_DRAFT, *UNUSED}
    expected = {origin.name for origin in layout.values()}
    unknown = sorted(tensors.names - expected - shared_names)
    if unknown:
        raise UserError(
            f"{folder} has {len(unknown)} unknown tensors, such as "
            f"{unknown[0]}: use another drafter."
        )
    pickled = next(folder.glob("mask_embedding.*"), None)
    if pickled is not None:
        raise UserError(
            f"{folder} has its mask embedding as the pickled file {pickled.name}, "
            "which can run code and is not read: use another drafter."
        )
    with naming(folder):
        arrays: dict[str, np.ndarray] = {
            path: origin.convert(read_tensor(tensors, origin))
            for path, origin in layout.items()
        }
    check_finite(arrays, folder)
    return arrays


def draft_vocabulary(
    folder: pathlib.Path,
    tensors: SafetensorsFiles,
    size: int | None,
    vocab_size: int,
) -> np.ndarray | None:
    """The ids of a draft vocabulary, `[size]` int32; None if it has all tokens.

    The tensors must agree with the declared size, which is None for all tokens.
    """
    expected = size or vocab_size
    if size is None and DRAFT_TO_TARGET not in tensors.names:
        distances, source = np.zeros(vocab_size, np.int64), CONFIG
    else:
        distances, source = tensors.read_integers(DRAFT_TO_TARGET), DRAFT_TO_TARGET
    if distances.shape != (expected,):
        raise UserError(
            f"{DRAFT_TO_TARGET} of {folder} has shape {list(distances.shape)}, but "
            f"{CONFIG} declares {expected} tokens (draft_vocab_size): the folder is "
            "damaged."
        )
    ids = np.arange(len(distances)) + distances.astype(np.int64)
    # Numbers beyond the vocabulary stay beyond it as int32.
    ids = np.clip(ids, -1, vocab_size).astype(np.int32)
    try:
        check_vocabulary(ids, vocab_size)
    except ValueError as error:
        raise UserError(
            f"{DRAFT_TO_TARGET} of {folder}: {error}; get the folder again."
        ) from error
    # A mask over all tokens, which some folders have; without it, distances of ids from
    # 0, 1, 2, … increase seldom, and ids in their order always.
    if TARGET_IN_DRAFT not in tensors.names:
        if len(ids) > 2 and (np.diff(distances.astype(np.int64)) > 0).all():
            raise UserError(
                f"{DRAFT_TO_TARGET} of {folder} seems to hold ids of tokens, not their "
                "distances from the ids of the draft vocabulary: subtract 0, 1, 2, …."
            )
    else:
        mask = tensors.read_integers(TARGET_IN_DRAFT)
        if mask.shape != (vocab_size,) or not np.array_equal(
            np.flatnonzero(mask), np.sort(ids)
        ):
            raise UserError(
                f"{source} and {TARGET_IN_DRAFT} of {folder} name different tokens: "
                "the folder is damaged; get it again."
            )
    if size is None and distances.any():
        raise UserError(
            f"{DRAFT_TO_TARGET} of {folder} changes the order of the tokens, but "
            f"{CONFIG} declares no draft vocabulary: the folder is damaged."
        )
    return None if size is None else ids


def _table(
    folder: pathlib.Path, tensors: SafetensorsFiles, name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """A matrix of the drafter that has a counterpart of this shape in the target."""
    table = tensors.read(name)
    if table.shape != shape:
        raise UserError(
            f"{name} of {folder} has shape {list(table.shape)} and not "
            f"{list(shape)}: the drafter belongs to another model."
        )
    return table


def target_embedding(
    folder: pathlib.Path,
    tensors: SafetensorsFiles,
    embedding: Array,
    besides: int | None = None,
) -> np.ndarray | None:
    """The drafter's embedding; None if it has none.

    Its rows, but for row `besides`, must be about those of the target.
    """
    if EMBEDDING not in tensors.names:
        return None
    embeddings = _table(folder, tensors, EMBEDDING, embedding.shape)
    difference = size = 0.0
    for begin in range(0, len(embeddings), _ROWS):
        rows = slice(begin, begin + _ROWS)
        expected = np.array(on_host(embedding[rows]), np.float32)
        actual = np.array(embeddings[rows], np.float32)
        if besides is not None and begin <= besides < begin + len(actual):
            actual[besides - begin] = expected[besides - begin]
        difference += float(np.square(actual - expected).sum())
        size += float(np.square(expected).sum())
    if not difference <= _SAME_EMBEDDING**2 * size:
        raise UserError(
            f"the embeddings of the drafter in {folder} differ from those of the "
            "model: it belongs to another model."
        )
    return embeddings


def own_softmax(
    folder: pathlib.Path, tensors: SafetensorsFiles, softmax: Array
) -> np.ndarray | None:
    """The drafter's softmax; None if it has none of its own; see `unless_equal`."""
    if SOFTMAX not in tensors.names:
        return None
    return unless_equal(_table(folder, tensors, SOFTMAX, softmax.shape), softmax)


def unless_equal(table: np.ndarray, target: Array) -> np.ndarray | None:
    """A drafter's table; None if it equals the target's in the narrower precision."""
    for begin in range(0, len(table), _ROWS):
        rows = slice(begin, begin + _ROWS)
        expected = np.asarray(on_host(target[rows]))
        narrow = np.dtype(min(table.dtype, expected.dtype, key=lambda t: t.itemsize))
        if not np.array_equal(table[rows].astype(narrow), expected.astype(narrow)):
            return table
    return None
