"""Opens model folders in the format of Hugging Face's library transformers."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping

import numpy as np
import tokenizers

from bpd_jax.base.errors import UserError, warn
from bpd_jax.decoding.pretrained_checkpoint import Checkpoint, Origin, Path
from bpd_jax.formats.generation_settings import generation_settings
from bpd_jax.formats.hf_config import (
    GPT2,
    text_model,
    transformer_config,
    variant_of,
)
from bpd_jax.formats.hf_tokenizer import (
    begin_of_text,
    chat_templates,
    read_tokenizer,
    special_texts,
    special_token,
    tokenizer_settings,
)
from bpd_jax.formats.json_files import Fields
from bpd_jax.formats.safetensors_files import SafetensorsFiles, open_checkpoint
from bpd_jax.formats.trunk_layouts import gpt2_layout, llama_layout
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.storage.paths import as_path

SOFTMAX = "lm_head.weight"

_WITH_IMAGES = ("model.language_model.", "language_model.model.")


def open_folder(folder: str | os.PathLike[str]) -> Checkpoint:
    """Opens a folder with config.json, safetensors files and tokenizer.json.

    No code in it is executed, and only names and shapes of its tensors are read.
    """
    folder = as_path(folder)
    fields = text_model(Fields.read(folder / "config.json"))
    config = transformer_config(fields)
    tensors = open_checkpoint(folder)
    settings = tokenizer_settings(folder)
    tokenizer = read_tokenizer(folder, settings)
    begin = begin_of_text(settings, tokenizer)
    generation = Fields.read(folder / "generation_config.json", optional=True)
    ends = _end_tokens(folder, [generation, fields], settings, tokenizer)
    for token in (*ends, *([] if begin is None else [begin])):
        if not 0 <= token < config.vocab_size:
            raise UserError(
                f"{folder} has token {token} as a begin or end token, but the model "
                f"has only {config.vocab_size} tokens."
            )
    config, layout = _layout(config, fields, tensors)
    templates, texts = chat_templates(folder, settings), special_texts(settings)
    return Checkpoint(
        config=config,
        layout=layout,
        tensors=tensors,
        tokenizer=tokenizer,
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        begin_of_text=begin,
        begin_text=str(texts.get("bos_token", "")),
        special_texts=texts,
        end_tokens=ends,
        generation=generation_settings(generation, config.vocab_size),
    )


def _layout(
    config: TransformerConfig, fields: Fields, tensors: SafetensorsFiles
) -> tuple[TransformerConfig, dict[Path, Origin]]:
    """The location of each parameter; checks that all of them exist.

    In the configuration that is returned the softmax is tied only if it is in the
    files.
    """
    is_gpt2 = fields.text("model_type") == GPT2
    table = ("wte" if is_gpt2 else "embed_tokens") + ".weight"
    block = "h." if is_gpt2 else "layers."
    # The last two are of models that also read images.
    prefixes = ["transformer."] if is_gpt2 else ["model.", *_WITH_IMAGES]
    found = [
        prefix
        for prefix in (*prefixes, "")
        if any(name.startswith(prefix + block) for name in tensors.names)
    ]
    prefix = (found or prefixes)[0]
    embedding = prefix + table
    both = {embedding, SOFTMAX} <= tensors.names
    if (
        config.tied_softmax
        and both
        and not (
            tensors.shape(embedding) == tensors.shape(SOFTMAX)
            and np.array_equal(tensors.read(embedding), tensors.read(SOFTMAX))
        )
    ):
        warn(
            f"{fields.source} ties the softmax to the embedding, but {embedding} and "
            f"{SOFTMAX} differ: both are used, as in transformers; set "
            "tie_word_embeddings to false."
        )
        config = dataclasses.replace(config, tied_softmax=False)
    if is_gpt2:
        layout = gpt2_layout(config, prefix)
    else:
        layout = llama_layout(config, prefix, variant_of(fields))
    if config.tied_softmax and embedding not in tensors.names:
        # Some files hold the shared matrix under the name of the softmax.
        origin = layout["embedding",]
        layout["embedding",] = dataclasses.replace(origin, name=SOFTMAX)
    tensors.check(layout)
    _check_unused(tensors, fields, prefix, layout)
    return config, layout


# Tensors that transformers neither uses: tables of positions, masks of GPT-2.
_NO_PARAMETERS = re.compile(r".*rotary_emb\.inv_freq|.*\battn\.(masked_)?bias")
# Heads that Medusa adds to a model; `import_heads` reads them.
_OTHER_HEADS = ("medusa_head.", "medusa_heads.")


def _check_unused(
    tensors: SafetensorsFiles,
    fields: Fields,
    prefix: str,
    layout: Mapping[Path, Origin],
) -> None:
    """Refuses tensors of the model that its configuration leaves out.

    Without biases, norms or layers that it was trained with, it would write other
    texts. Of models that also read images, only the part for texts is checked.
    """
    used = {
        part.name for stacked in layout.values() for part in stacked.parts or [stacked]
    }
    unused = sorted(
        name
        for name in tensors.names - used - {SOFTMAX}
        if not _NO_PARAMETERS.fullmatch(name)
        and not name.startswith(_OTHER_HEADS)
        and (prefix not in _WITH_IMAGES or name.startswith(prefix))
    )
    if not unused:
        return
    others = f" and {len(unused) - 1} others" if len(unused) > 1 else ""
    remedy = "give it the config.json that it was saved with"
    if "lora_" in unused[0]:
        remedy = "merge its adapters into the weights (merge_and_unload of peft)"
    raise UserError(
        f"{fields.source} leaves out the tensor {unused[0]}{others}, without which the "
        f"model would write other texts: {remedy}."
    )


def _end_tokens(
    folder: pathlib.Path,
    sources: list[Fields],
    settings: Fields,
    tokenizer: tokenizers.Tokenizer,
) -> tuple[int, ...]:
    """The tokenizer's end token, and the end tokens of the model's configuration."""
    end_of_text = special_token(settings, "eos_token", tokenizer)
    tokens = [] if end_of_text is None else [end_of_text]
    for source in sources:
        for token in source.items("eos_token_id"):
            if type(token) is not int:
                raise UserError(
                    f"eos_token_id in {source.source} must be an id or a list of ids."
                )
            tokens.append(token)
    if not tokens:
        raise UserError(
            f"{folder} has no end-of-text token: set eos_token_id in its config.json."
        )
    return tuple(dict.fromkeys(tokens))
