"""Cuts documents, examples and generated texts to pieces, and packs these into rows.

The piece of an example consists of its inputs, which are context, and its targets,
which contribute to the loss. Inputs `E a b c s` (E is the end-of-text token, s the
separator) and targets `x y E` become

    tokens   E a b c s x y E
    in loss  0 0 0 0 0 1 1 1

A generated text is used unchanged: it begins with its prompt, which is context, and
ends with the end-of-text token unless generation was stopped by the maximum length.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.data.corpora import EmptySplitError, split_of
from bpd_jax.data.generations import Generations
from bpd_jax.data.text_task import ALL

# Maximum number of incomplete rows. More of them reduce padding and take more time.
_MAX_OPEN_ROWS = 64


def join_examples(
    examples: Iterable[Mapping[str, np.ndarray]],
    length: int,
    separator: int,
    cut: dict[str, int],
) -> Iterator[np.ndarray]:
    """Yields every example as one piece of at most `length` tokens.

    If an example is too long, its inputs lose their last tokens before the separator.
    If only E and the separator are left of the inputs, the targets lose their last
    tokens, including the final E. The example above in shorter rows:

        length 7   E a b s x y E
        length 5   E s x y E
        length 4   E s x y

    Args:
      examples: `inputs` `[m]`, which begin with E and end with the separator, and
        `targets` `[n]`, which end with E.
      length: tokens of a row.
      separator: number of tokens of the separator.
      cut: counts of truncated examples, updated in place: `inputs`, examples whose
        inputs were truncated; `targets`, those whose targets were, too; `tokens`, how
        many were omitted.

    Yields:
      `[p, 2]` int32: each token, and 1 if it is in the loss.
    """
    shortest = 1 + separator
    if length <= shortest:
        raise UserError(
            f"length is {length}: E and the separator of the inputs alone take "
            f"{shortest} tokens of a row."
        )
    for example in examples:
        inputs, targets = example["inputs"], example["targets"]
        excess = len(inputs) + len(targets) - length
        if excess > 0:
            new_targets = targets[: length - shortest]
            num_inputs = length - len(new_targets) - separator
            cut["targets"] += len(new_targets) < len(targets)
            cut["inputs"] += num_inputs + separator < len(inputs)
            cut["tokens"] += excess
            separator_tokens = inputs[len(inputs) - separator :]
            inputs = np.concatenate([inputs[:num_inputs], separator_tokens])
            targets = new_targets
        tokens = np.concatenate([inputs, targets])
        in_loss = np.arange(len(tokens)) >= len(inputs)
        yield np.stack([tokens, in_loss], axis=-1).astype(np.int32)


def cut_documents(documents: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """Splits documents into consecutive pieces; the last one may be shorter.

    Documents are `[n]` ids, or `[n, C]` with C values for each token.
    """
    for tokens in documents:
        for start in range(0, len(tokens), length):
            yield tokens[start : start + length]


def split_texts(
    texts: Generations, split: str, validation_fraction: float
) -> list[int]:
    """Returns the indices of the texts of a split (or of `all`), in ascending order.

    The split of a text depends only on its tokens, so that equal texts are in the same
    split, and adding texts does not change the split of others.
    """
    keys = (texts[row].astype("<i4").tobytes().hex() for row in range(len(texts)))
    splits = (split_of(key, validation_fraction) for key in keys)
    rows = [row for row, own in enumerate(splits) if split in (ALL, own)]
    if not rows:
        raise EmptySplitError(
            f"none of the {len(texts)} texts of {texts.folder} falls into the {split} "
            f"split at validation_fraction={validation_fraction}",
            "generate more texts.",
        )
    return rows


def cut_texts(
    texts: Generations, rows: Iterable[int], length: int
) -> Iterator[np.ndarray]:
    """Splits the texts `rows` into pieces of `length` tokens; the last may be shorter.

    Yields `[n, 2]` int32: each token, and 1 if the model generated it. For the prompt
    `a b`, the generated tokens `c d E`, and length 3:

        tokens     a b c   d E
        generated  0 0 1   1 1

    Pieces without a token in the loss are omitted. (The first token of a piece is never
    in the loss, because it has no context.)
    """
    for row in rows:
        tokens = texts[row]
        generated = np.arange(len(tokens)) >= texts.prompt_lengths[row]
        text = np.stack([tokens, generated], axis=-1)
        for piece in cut_documents([text], length):
            if piece[1:, 1].any():
                yield piece


def end_token(texts: Generations) -> int | None:
    """The end-of-text token that was used in decoding, or None."""
    options = texts.facts.get("options")
    end = options.get("end_of_text") if isinstance(options, dict) else None
    if isinstance(end, list) and end:
        end = end[0]
    return end if isinstance(end, int) and 0 <= end < texts.vocab_size else None


def pack(
    pieces: Iterable[np.ndarray], length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Packs pieces into rows by best fit.

    A row is yielded when it is full. If a piece fits into no open row and the maximum
    number of rows is open, the fullest one is yielded, padded at its end. For length 4:

        pieces       1 2 3 | 4 5 6 7 | 8
        tokens       4 5 6 7,  1 2 3 8
        segment_ids  1 1 1 1,  1 1 1 2

    Args:
      pieces: `[n]` ids with 1 ≤ n ≤ length, or `[n, C]` with C values for each token.
        The id 0 is a token, not padding.
      length: tokens of a row, T.

    Yields:
      tokens `[T]` or `[T, C]` int32, and segment_ids `[T]` int32 (1, 2, ...; 0 is
      padding).
    """
    open_rows: list[list[np.ndarray]] = []
    free_positions: list[int] = []  # Number of free positions of each open row.
    for piece in pieces:
        fitting = [i for i, free in enumerate(free_positions) if free >= len(piece)]
        if fitting:
            best = min(fitting, key=free_positions.__getitem__)
            open_rows[best].append(piece)
            free_positions[best] -= len(piece)
        else:
            if len(open_rows) == _MAX_OPEN_ROWS:
                fullest = free_positions.index(min(free_positions))
                free_positions.pop(fullest)
                yield _row(open_rows.pop(fullest), length)
            open_rows.append([piece])
            free_positions.append(length - len(piece))
            best = len(free_positions) - 1
        if free_positions[best] == 0:
            free_positions.pop(best)
            yield _row(open_rows.pop(best), length)
    for row in open_rows:
        yield _row(row, length)


def pad(
    pieces: Iterable[np.ndarray], length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields a row for each piece, padded; arguments and results are as for `pack`."""
    for piece in pieces:
        yield _row([piece], length)


def _row(pieces: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((length, *pieces[0].shape[1:]), np.int32)
    segment_ids = np.zeros(length, np.int32)
    start = 0
    for number, piece in enumerate(pieces, start=1):
        end = start + len(piece)
        tokens[start:end] = piece
        segment_ids[start:end] = number
        start = end
    return tokens, segment_ids
