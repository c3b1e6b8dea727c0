"""Opens model folders in the format of Hugging Face's library transformers."""

import dataclasses
import os
import pathlib

import numpy as np
import tokenizers

from bpd_jax.base.errors import UserError, library_errors, warn
from bpd_jax.data.text_readers import read_text
from bpd_jax.decoding.pretrained_checkpoint import Checkpoint, Origin, Path
from bpd_jax.formats.generation_settings import generation_settings
from bpd_jax.formats.hf_config import (
    GPT2,
    text_model,
    transformer_config,
    variant_of,
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
    tokenizer = _read_tokenizer(folder)
    older = Fields.read(folder / "special_tokens_map.json", optional=True)
    newer = Fields.read(folder / "tokenizer_config.json", optional=True)
    settings = Fields({**older.values, **newer.values}, newer.source)
    begin = _begin_of_text(settings, tokenizer)
    generation = Fields.read(folder / "generation_config.json", optional=True)
    ends = _end_tokens(folder, [generation, fields], settings, tokenizer)
    for token in (*ends, *([] if begin is None else [begin])):
        if not 0 <= token < config.vocab_size:
            raise UserError(
                f"{folder} has token {token} as a begin or end token, but the model "
                f"has only {config.vocab_size} tokens."
            )
    config, layout = _layout(config, fields, tensors)
    return Checkpoint(
        config=config,
        layout=layout,
        tensors=tensors,
        tokenizer=tokenizer,
        chat_template=_chat_template(folder, settings),
        begin_of_text=begin,
        begin_text=_special_text(settings, "bos_token"),
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
    return config, layout


def _read_tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{folder} has no tokenizer.json, and older files (tokenizer.model, "
            "vocab.json) are not read: load and save its tokenizer with transformers."
        )
    text = read_text(path)
    with library_errors(f"{path} is not a tokenizer.json"):
        tokenizer = tokenizers.Tokenizer.from_str(text)
        # Padding to a fixed length could take any amount of memory.
        tokenizer.no_padding()
        tokenizer.no_truncation()
    return tokenizer


def _special_text(settings: Fields, name: str) -> str:
    """The text of `bos_token` or `eos_token`, stored as a string or in an object."""
    value = settings.values.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _special_token(
    settings: Fields, name: str, tokenizer: tokenizers.Tokenizer
) -> int | None:
    text = _special_text(settings, name)
    return tokenizer.token_to_id(text) if text else None


def _begin_of_text(settings: Fields, tokenizer: tokenizers.Tokenizer) -> int | None:
    """The token that every text begins with; None if there is none.

    As in transformers 5, it is the one that the post-processor of tokenizer.json adds;
    `add_bos_token` in the settings takes precedence.
    """
    with library_errors("the tokenizer cannot encode a text"):
        whole, bare = (
            tokenizer.encode("a", add_special_tokens=added).ids
            for added in (True, False)
        )
    begin = _special_token(settings, "bos_token", tokenizer)
    count = int(whole[:1] == [begin])
    if bare:
        starts = (n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        count = next(starts, 0)
    if count > 1:
        raise UserError(
            f"{settings.source}: texts begin with {count} special tokens, which is not "
            "supported: its tokenizer.json may add one."
        )
    added = whole[0] if count else None
    if not settings.flag("add_bos_token", count > 0):
        return None
    return begin if added is None else added


def _end_tokens(
    folder: pathlib.Path,
    sources: list[Fields],
    settings: Fields,
    tokenizer: tokenizers.Tokenizer,
) -> tuple[int, ...]:
    """The tokenizer's end token, and the end tokens of the model's configuration."""
    end_of_text = _special_token(settings, "eos_token", tokenizer)
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


def _chat_template(folder: pathlib.Path, settings: Fields) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    templates = settings.items("chat_template")
    named = {
        str(template.get("name")): template.get("template")
        for template in templates
        if isinstance(template, dict)
    }
    [only] = templates if len(templates) == 1 else [None]
    chosen = named.get("default", next(iter(named.values()))) if named else only
    if chosen is not None and not isinstance(chosen, str):
        raise UserError(f"chat_template in {settings.source} must be a string.")
    return chosen
