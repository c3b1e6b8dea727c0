"""Prompts of users: from a file, and checks."""

import os
from collections.abc import Sequence

from bpd_jax.base.errors import UserError
from bpd_jax.data import text_readers


def read_prompts_file(path: str | os.PathLike[str]) -> list[str]:
    """Reads prompts: JSON Lines with the field `prompt`, or one prompt per line.

    A file named `.jsonl` or `.jsonl.gz` is JSON Lines. Blank lines of other files are
    skipped.
    """
    if text_readers.is_json_lines(path):
        records = text_readers.read_json_fields(path, ["prompt"], kept=True)
        prompts = [texts["prompt"][0] for _, texts in records]
    else:
        lines = text_readers.read_lines(path, kept=True)
        prompts = [text for _, text in lines if text.strip()]
    if not prompts:
        raise UserError(f"{path} contains no prompt: write one per line.")
    check_texts(prompts)
    return prompts


def check_texts(prompts: Sequence[object]) -> None:
    """Raises a `UserError` if a prompt is an empty text, or is not UTF-8."""
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str):
            continue
        if not prompt:
            raise UserError(f"prompt {number} is empty: give at least one character.")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            # Python keeps a byte of the command line as a surrogate.
            code = ord(prompt[error.start])
            kind = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else ""
            raise UserError(
                f"prompt {number} is not UTF-8 text: character {error.start + 1} is "
                f"the {kind or f'lone surrogate U+{code:04X}'}."
            ) from error
