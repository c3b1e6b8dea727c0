"""A model's own texts: what block heads learn to predict.

Verification accepts what the model itself would say, so heads are trained on its own
continuations (self-distillation, Cai et al. 2024, section 2.2.1), of prompts that are
given, or that the model makes up itself: a model taught on conversations, given the
beginning of a user's turn, writes what users ask (Xu et al. 2024, "Magpie").
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from bpd_jax.data.generations import shard_name, write_shard
from bpd_jax.decoding.generate import Task
from bpd_jax.errors import UserError

# Prompts are padded to one of these, each half as long again as the one before: few
# shapes are compiled, and few tokens are wasted.
_SHORTEST, _STEP = 64, 32

# Of made-up prompts: more tokens than this, and batches in a row that may give none.
_LEAST_WORDS, _MOST_BARREN = 4, 8

# Stands for the user's words in a rendered conversation.
_SENTINEL = "\N{OBJECT REPLACEMENT CHARACTER}"


class Chunk(NamedTuple):
    """Prompts that are decoded together and become one shard.

    Attributes:
      shard: its number.
      indices: of its prompts among all: they choose the noise of sampling too.
      padded: length to which they are padded.
    """

    shard: int
    indices: list[int]
    padded: int


def chunks_of(prompts: Sequence[np.ndarray], batch_size: int, seed: int) -> list[Chunk]:
    """Groups prompts of like length, in a random order of groups.

    Any first part of the result is a fair sample of the lengths, so that a run may be
    stopped at any time. The same arguments give the same groups.
    """
    by_length = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    groups = [
        by_length[start : start + batch_size]
        for start in range(0, len(prompts), batch_size)
    ]
    order = np.random.default_rng(seed).permutation(len(groups))
    return [
        Chunk(index, groups[group], padded_length(len(prompts[groups[group][-1]])))
        for index, group in enumerate(order)
    ]


def padded_length(length: int) -> int:
    """The least padding that holds `length` tokens.

    >>> [padded_length(n) for n in (1, 64, 65, 97, 150, 1000)]
    [64, 64, 96, 160, 160, 1312]
    """
    size = _SHORTEST
    while size < length:
        size = math.floor(size * 1.5 / _STEP + 0.5) * _STEP
    return size


def distill(
    task: Task,
    prompts: Sequence[np.ndarray],
    chunks: Sequence[Chunk],
    batch_size: int,
    folder: str | os.PathLike[str],
    on_progress: Callable[[int], object] = lambda tokens: None,
) -> None:
    """Writes the model's continuations of every chunk whose shard is not there yet.

    Args:
      task: model, method and options.
      prompts: token ids of all.
      chunks: from `chunks_of` the prompts.
      batch_size: rows of a batch, at least as many as a chunk has prompts.
      folder: of the shards; see `bpd_jax.data.generations`.
      on_progress: called after each chunk with the number of new tokens in it.
    """
    for chunk in chunks:
        if not (pathlib.Path(folder) / shard_name(chunk.shard)).exists():
            texts = continue_prompts(
                task, prompts, chunk.indices, batch_size, chunk.padded
            )
            prompt_lengths = [len(prompts[index]) for index in chunk.indices]
            write_shard(folder, chunk.shard, texts, prompt_lengths)
            on_progress(sum(map(len, texts)) - sum(prompt_lengths))


def continue_prompts(
    task: Task,
    prompts: Sequence[np.ndarray],
    indices: Sequence[int],
    batch_size: int,
    padded: int,
) -> list[np.ndarray]:
    """Some of the prompts with what the model says next, the end token included.

    A text is what `Decoder.decode` says of the prompt among all: its noise depends on
    the prompt's index, not on its row in the batch.
    """
    new_tokens = task.options.max_new_tokens
    state = task.run(task.prefill(prompts, indices, batch_size, new_tokens, padded))
    tokens, lengths = jax.device_get((state.tokens, state.lengths))
    return [tokens[row, : lengths[row]] for row in range(len(indices))]


def make_up_prompts(
    task: Task,
    opening: np.ndarray,
    count: int,
    batch_size: int,
    on_progress: Callable[[int], object] = lambda prompts: None,
) -> list[np.ndarray]:
    """Prompts that the model makes up, different from each other.

    What is longer than `max_new_tokens`, shorter than four tokens, or there already is
    thrown away, and another one is drawn.

    Args:
      task: model, method and options; it must sample.
      opening: tokens of a conversation up to where the user's words begin.
      count: prompts to make up.
      batch_size: rows drawn together.
      on_progress: called after each batch with the number of prompts it gave.

    Returns:
      Tokens of the users' words, without what came before or ended them.

    Raises:
      UserError: the model keeps saying the same.
    """
    found: dict[bytes, np.ndarray] = {}
    barren, seed = 0, task.options.seed
    while len(found) < count:
        options = dataclasses.replace(task.options, seed=seed % 2**32)
        drawing = dataclasses.replace(task, options=options)
        padded = padded_length(len(opening))
        openings, rows = [opening] * batch_size, range(batch_size)
        texts = continue_prompts(drawing, openings, rows, batch_size, padded)
        before = len(found)
        for text in texts:
            words = text[len(opening) :]
            ended = len(words) > 0 and int(words[-1]) in options.end_tokens
            if ended and len(words) > _LEAST_WORDS and len(found) < count:
                found.setdefault(words.tobytes(), words[:-1])
        on_progress(len(found) - before)
        barren = 0 if len(found) > before else barren + 1
        if barren == _MOST_BARREN:
            raise UserError(
                f"the model made up {len(found)} prompts, and then none in {barren} "
                f"batches of {batch_size}: ask for fewer, raise the temperature, or "
                "let them be longer."
            )
        seed += 1
    return list(found.values())


def opening_of(render: Callable[[str], str]) -> str:
    """A conversation up to where the user's words begin.

    >>> opening_of(lambda words: f"<user>{words}</user><bot>")
    '<user>'
    """
    return render(_SENTINEL).partition(_SENTINEL)[0]
