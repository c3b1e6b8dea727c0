"""A model's own texts: what block heads learn to predict.

Verification accepts what the model itself would say, so heads are trained on its own
continuations (self-distillation, Cai et al. 2024, section 2.2.1), of prompts that are
given, or that the model makes up itself: a model taught on conversations, given the
beginning of a user's turn, writes what users ask (Xu et al. 2024, "Magpie").
"""

import dataclasses
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np

from bpd_jax.data.generations import (
    next_shard,
    open_generations,
    shard_paths,
    write_shard,
)
from bpd_jax.decoding.generate import Task
from bpd_jax.decoding.refill import decode_refilled, padded_length
from bpd_jax.errors import UserError

# A run that is stopped loses at most as many texts.
TEXTS_PER_SHARD = 256

# Of made-up prompts: more tokens than this, and batches in a row that may give none.
_LEAST_WORDS, _MOST_BARREN = 4, 8

# Stands for the user's words in a rendered conversation.
_SENTINEL = "\N{OBJECT REPLACEMENT CHARACTER}"


def order_of(prompts: Sequence[np.ndarray], seed: int) -> list[int]:
    """The prompts in the order in which they are answered: a random one.

    Any first part of the texts is a fair sample, so a run may be stopped at any time.
    """
    return np.random.default_rng(seed).permutation(len(prompts)).tolist()


def answered(
    prompts: Sequence[np.ndarray],
    folder: str | os.PathLike[str],
    *,
    same_prompts: bool = True,
) -> set[int]:
    """Indices of the prompts whose texts are in a folder.

    Args:
      prompts: token ids of all.
      folder: of texts; it may be empty.
      same_prompts: whether the folder answers these prompts, so that the indices in
        its shards are theirs. Otherwise, and in shards of earlier versions, which lack
        indices, the tokens of the prompts are compared.
    """
    done: set[int] = set()
    if not shard_paths(folder):
        return done
    texts = open_generations(folder)
    assert texts.indices is not None
    places: dict[bytes, list[int]] = {}
    for index, prompt in reversed(list(enumerate(prompts))):
        places.setdefault(np.asarray(prompt, np.int32).tobytes(), []).append(index)
    for row, index in enumerate(texts.indices.tolist()):
        if same_prompts and index >= 0:
            done.add(index)
            continue
        prompt = texts[row][: texts.prompt_lengths[row]]
        if remaining := places.get(prompt.tobytes()):
            done.add(remaining.pop())
    return done


def distill(
    task: Task,
    prompts: Sequence[np.ndarray],
    indices: Sequence[int],
    folder: str | os.PathLike[str],
    *,
    texts_per_shard: int = TEXTS_PER_SHARD,
    on_progress: Callable[[int], object] = lambda tokens: None,
) -> None:
    """Writes the model's continuations of prompts into new shards of a folder.

    Args:
      task: model, method and options.
      prompts: token ids of all.
      indices: of those to continue, in the order in which they begin.
      folder: of the shards; see `bpd_jax.data.generations`.
      texts_per_shard: how many texts a shard holds; the last one may hold fewer.
      on_progress: called after each text with the number of its new tokens.
    """
    texts: list[tuple[int, np.ndarray]] = []

    def flush() -> None:
        write_shard(
            folder,
            next_shard(folder),
            [text for _, text in texts],
            [len(prompts[index]) for index, _ in texts],
            [index for index, _ in texts],
        )
        texts.clear()

    for index, text in decode_refilled(task, prompts, indices):
        texts.append((index, text))
        on_progress(len(text) - len(prompts[index]))
        if len(texts) == texts_per_shard:
            flush()
    if texts:
        flush()


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
