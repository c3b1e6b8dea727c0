"""Reads the tokenizer of a Hugging Face folder, its special tokens and templates."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from bpd_jax.base.errors import UserError, library_errors, warn
from bpd_jax.data.text_readers import read_text
from bpd_jax.formats.json_files import Fields

_CONFIG = "tokenizer_config.json"
_ADDED = "added_tokens_decoder"
# Of `tokenizers.AddedToken`; tokenizer_config.json has the same fields.
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def tokenizer_settings(folder: pathlib.Path) -> Fields:
    """The fields of tokenizer_config.json, or of the older special_tokens_map.json."""
    older = Fields.read(folder / "special_tokens_map.json", optional=True)
    newer = Fields.read(folder / _CONFIG, optional=True)
    return Fields({**older.values, **newer.values}, newer.source)


def read_tokenizer(folder: pathlib.Path, settings: Fields) -> tokenizers.Tokenizer:
    """Reads tokenizer.json, and the added tokens that only other files have."""
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
    source, added = _added_tokens(folder, settings)
    known = tokenizer.get_added_tokens_decoder()
    # One with other flags in tokenizer.json gets those of the other file. All are added
    # together: each addition reads all added tokens again.
    more = [token for n, token in sorted(added.items()) if known.get(n) != token]
    with library_errors(f"{source} has tokens that cannot be added"):
        tokenizer.add_tokens(more)
    for token_id, token in added.items():
        actual = tokenizer.token_to_id(token.content)
        if actual != token_id:
            raise UserError(
                f"{source} gives the added token {token.content!r} the id {token_id}, "
                f"but after the tokens of {path} it has {actual}: they belong to "
                "different tokenizers."
            )
    return tokenizer


def _added_tokens(
    folder: pathlib.Path, settings: Fields
) -> tuple[str, dict[int, tokenizers.AddedToken]]:
    """The added tokens by their ids, and the file that lists them."""
    listed = settings.fields(_ADDED)
    tokens = {}
    for key, value in listed.values.items():
        content = value.get("content") if isinstance(value, dict) else None
        if not isinstance(content, str) or not content or not key.isdecimal():
            raise UserError(
                f"{listed.source} must have ids with objects that have a content, not "
                f"{key!r}: {value!r}."
            )
        flags = Fields(value, listed.source)
        given = {flag: flags.flag(flag, False) for flag in _FLAGS}
        tokens[int(key[:18])] = tokenizers.AddedToken(content, **given)
    if tokens:
        return listed.source, tokens
    # Older folders have only their texts; those of the settings are special.
    older = Fields.read(folder / "added_tokens.json", optional=True)
    named = set(_texts(special_texts(settings)))
    for content in older.values:
        special = content in named
        token = tokenizers.AddedToken(content, normalized=not special, special=special)
        tokens[older.integer(content)] = token
    return older.source, tokens


def special_texts(settings: Fields) -> dict[str, str | list[str]]:
    """The texts of all special tokens by their names, such as `pad_token`."""
    extra = settings.values.get("extra_special_tokens")
    both = {**settings.values, **(extra if isinstance(extra, dict) else {})}
    texts: dict[str, str | list[str]] = {
        name: text
        for name, value in both.items()
        if name.endswith("_token") and (text := _content(value))
    }
    more = settings.values.get("additional_special_tokens")
    if isinstance(more, list):
        contents = [text for value in more if (text := _content(value))]
        texts["additional_special_tokens"] = contents
    return texts


def _content(value: Any) -> str:
    """The text of a token that is stored as a string or in an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _texts(special: Mapping[str, str | list[str]]) -> Iterator[str]:
    for value in special.values():
        yield from [value] if isinstance(value, str) else value


def begin_of_text(settings: Fields, tokenizer: tokenizers.Tokenizer) -> int | None:
    """The token that every text begins with; None if there is none.

    As in transformers 5, it is the one that the post-processor of tokenizer.json adds,
    whatever `add_bos_token` says.
    """
    with library_errors("the tokenizer cannot encode a text"):
        whole, bare = (
            tokenizer.encode("a", add_special_tokens=added).ids
            for added in (True, False)
        )
    begin = special_token(settings, "bos_token", tokenizer)
    count = int(whole[:1] == [begin])
    if bare:
        starts = (n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        count = next(starts, 0)
    if count > 1:
        raise UserError(
            f"{settings.source}: texts begin with {count} special tokens, which is not "
            "supported: its tokenizer.json may add one."
        )
    return whole[0] if count else None


def special_token(
    settings: Fields, name: str, tokenizer: tokenizers.Tokenizer
) -> int | None:
    """The id of `bos_token` or `eos_token`; None if there is none."""
    text = _content(settings.values.get(name))
    return tokenizer.token_to_id(text) if text else None


def chat_templates(folder: pathlib.Path, settings: Fields) -> dict[str, str]:
    """The chat templates by name; the one without a name is `default`.

    As in transformers, files have precedence over tokenizer_config.json. Older folders
    have chat_template.json.
    """
    templates = _named(settings)
    if not templates:
        templates = _named(Fields.read(folder / "chat_template.json", optional=True))
    if (path := folder / "chat_template.jinja").is_file():
        templates["default"] = read_text(path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    if templates and "default" not in templates:
        name = next(iter(templates))
        if len(templates) > 1:
            warn(
                f"{folder} has the chat templates {', '.join(templates)} and no "
                f"default: {name} is used."
            )
        templates["default"] = templates[name]
    return templates


def _named(fields: Fields) -> dict[str, str]:
    """The templates in the field `chat_template`: one text, or a list with names."""
    templates = {}
    for entry in fields.items("chat_template"):
        named = isinstance(entry, dict)
        name = str(entry.get("name")) if named else "default"
        text = entry.get("template") if named else entry
        if not isinstance(text, str):
            raise UserError(f"chat_template in {fields.source} must be a string.")
        templates[name] = text
    return templates
