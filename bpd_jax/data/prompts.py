"""Prompts to decode: pieces of held-out documents, or lines of a user's file."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.data import corpora, readers
from bpd_jax.data.spec import TextTask
from bpd_jax.data.tokenizer import Tokenizer, task_tokenizer
from bpd_jax.errors import UserError


class Prompt(NamedTuple):
    """A piece of a document.

    Attributes:
      document: id of the document.
      tokens: `[prompt_tokens]` int32; begins with the end-of-text token where the
        document begins.
    """

    document: str
    tokens: np.ndarray


def held_out_prompts(
    task: TextTask,
    num: int,
    prompt_tokens: int,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
) -> list[Prompt]:
    """Returns prompts from the validation split, all of one length.

    The begin marker and the tokens of each document are cut into consecutive windows
    of `prompt_tokens`; a shorter rest is no prompt. First comes the first window of
    every document, then the second window of every document, and so on, so the
    prompts come from as many documents as there are.

    Args:
      task: the corpus and its vocabulary.
      num: number of prompts.
      prompt_tokens: tokens of a prompt, T.
      seed: chooses the order of the documents.
      tokenizer: the task's tokenizer if it is at hand; else it is loaded.

    Raises:
      UserError: the validation split yields fewer prompts.
    """
    if num < 1 or prompt_tokens < 1:
        raise UserError(
            f"cannot cut {num} prompts of {prompt_tokens} tokens: both must be 1 or "
            "more."
        )
    tokenizer = tokenizer or task_tokenizer(task)
    documents = sorted(
        corpora.split_documents(task, "validation"),
        key=lambda document: (corpora.fraction_of(f"p{seed}", document.id), document),
    )
    encoded = tokenizer.encode_batch([document.text for document in documents])
    # (which window of its document, which document, the prompt)
    windows: list[tuple[int, int, Prompt]] = []
    for rank, (document, ids) in enumerate(zip(documents, encoded, strict=True)):
        tokens = np.array([tokenizer.end_of_text, *ids], np.int32)
        for turn in range(len(tokens) // prompt_tokens):
            window = tokens[turn * prompt_tokens : (turn + 1) * prompt_tokens]
            windows.append((turn, rank, Prompt(document.id, window)))
    if len(windows) < num:
        raise UserError(
            f"the {len(documents)} validation documents of {task.name} yield "
            f"{len(windows)} prompts of {prompt_tokens} tokens, and {num} are asked "
            "for: ask for fewer or shorter ones, or raise validation_fraction."
        )
    windows.sort(key=lambda window: window[:2])
    return [prompt for _, _, prompt in windows[:num]]


def read_prompts_file(path: str | os.PathLike[str]) -> list[str]:
    """Reads prompts: JSON Lines with the field `prompt`, or one prompt a line.

    A file named `.jsonl` or `.jsonl.gz` is JSON Lines. In any other file, blank lines
    are passed over.

    Raises:
      UserError: the file cannot be read, is not valid, or holds no or an empty prompt.
    """
    if readers.is_json_lines(path):
        prompts = [text for _, text in readers.read_json_field(path, "prompt")]
    else:
        prompts = [text for _, text in readers.read_lines(path) if text.strip()]
    if not prompts:
        raise UserError(f"{path} holds no prompt: write one a line.")
    check_not_empty(prompts)
    return prompts


def check_not_empty(prompts: Sequence[object]) -> None:
    """Raises a `UserError` for a prompt that is a text of no characters."""
    for number, prompt in enumerate(prompts, 1):
        if isinstance(prompt, str) and not prompt:
            raise UserError(f"prompt {number} is empty: give at least one character.")
