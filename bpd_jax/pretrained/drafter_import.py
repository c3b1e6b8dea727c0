"""Imports published block drafters; `drafter_layout` describes the layouts.

A drafter that bpd_jax cannot compute exactly is refused.
"""

import hashlib
import os

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params
from bpd_jax.models.attachment_files import LoadedDrafter
from bpd_jax.models.attachments import check_finite, fingerprint
from bpd_jax.models.block_heads import softmax_rows
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.partitioning import on_host
from bpd_jax.models.stored_tensors import file_digest
from bpd_jax.pretrained.drafter_description import describe
from bpd_jax.pretrained.drafter_layout import (
    check_sizes,
    draft_vocabulary,
    drafter_layout,
    own_softmax,
    read_layout,
    target_embedding,
)
from bpd_jax.pretrained.json_files import CONFIG, Fields, naming
from bpd_jax.pretrained.safetensors_files import open_checkpoint
from bpd_jax.storage.paths import as_path


def import_drafter(
    folder: str | os.PathLike[str],
    model: BlockwiseConfig,
    params: Params,
    *,
    name: str = "this model",
    base: str | None = None,
) -> LoadedDrafter:
    """Reads a published block drafter of a model, with tensors as they are stored.

    The files do not record the model exactly; its width, its vocabulary and, where the
    drafter has embeddings of its own, these are compared. The drafter has a softmax of
    its own if that differs from the target's.

    Args:
      folder: folder with config.json and safetensors files.
      model: the target model.
      params: parameters of the target.
      name: name of the target for messages.
      base: fingerprint of the target; None to compute it from `params`, which then have
        the layout in which they were stored.
    """
    folder = as_path(folder)
    fields = Fields.read(folder / CONFIG)
    tensors = open_checkpoint(folder)
    about = describe(fields, tensors.names)
    trunk = model.trunk
    check_sizes(folder, (about.d_model, about.vocab_size), trunk, name)
    if about.normalised_last and (trunk.num_layers - 1 in about.config.feature_layers):
        raise UserError(
            f"{fields.source} reads the last of the {trunk.num_layers} layers of "
            f"{name} after its final norm, which cannot be reproduced here: layers are "
            "read before it."
        )
    with naming(fields.source):
        config = about.config.resolve(trunk)
    layout = drafter_layout(config, trunk)
    arrays = read_layout(folder, tensors, layout)
    vocabulary = draft_vocabulary(
        folder, tensors, config.draft_vocabulary, trunk.vocab_size
    )
    if vocabulary is not None:
        arrays["vocabulary"] = vocabulary
    embedding = params["trunk"]["embedding"]
    own = target_embedding(folder, tensors, embedding, besides=about.mask_token)
    table = embedding if own is None else own
    arrays["mask_embedding"] = np.asarray(on_host(table[about.mask_token]), np.float32)
    softmax = own_softmax(folder, tensors, softmax_rows(model, params, vocabulary))
    if softmax is not None:
        arrays["softmax"] = softmax
    check_finite(arrays, folder)  # Also the embedding and the softmax.
    digest = hashlib.sha256()
    for path in [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]:
        digest.update(bytes.fromhex(file_digest(path)))
    return LoadedDrafter(
        config=config,
        tensors=arrays,
        base=base or fingerprint(model, params),
        base_name=name,
        d_model=trunk.d_model,
        vocab_size=trunk.vocab_size,
        facts={"imported_from": folder.resolve().name},
        folder=folder,
        identity=digest.hexdigest()[:16],
    )
