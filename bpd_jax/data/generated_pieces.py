"""Generated texts as pieces to pack, and their split. Needs only numpy.

A text is taken as it is: it begins as a prompt does when it is decoded, and ends with
the token that ended it, unless it was cut short. The model's own tokens are learnt; the
prompt is context.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from bpd_jax.data.corpora import EmptySplitError, fraction_of
from bpd_jax.data.generations import Generations
from bpd_jax.data.text_task import ALL, SPLITS, check_split


def split_texts(
    texts: Generations, split: str, validation_fraction: float
) -> list[int]:
    """Returns the indices of the texts of a split, in ascending order.

    The split of a text depends only on its tokens, so equal texts are in the same
    split, and adding texts does not change the split of others.

    Args:
      texts: generated texts.
      split: `train`, `validation`, or `all` for both together.
      validation_fraction: share of the texts held out for validation.

    Raises:
      EmptySplitError: the split has no text.
    """
    check_split(split)
    rows = [
        row
        for row in range(len(texts))
        if split == ALL or split == _split_of(texts[row], validation_fraction)
    ]
    if not rows:
        raise EmptySplitError(
            f"none of the {len(texts)} texts of {texts.folder} falls into the {split} "
            f"split at validation_fraction={validation_fraction}",
            "generate more texts.",
        )
    return rows


def _split_of(text: np.ndarray, validation_fraction: float) -> str:
    fraction = fraction_of("split", text.astype("<i4").tobytes().hex())
    return SPLITS[fraction < validation_fraction]


def cut_texts(
    texts: Generations, rows: Iterable[int], length: int
) -> Iterator[np.ndarray]:
    """Yields pieces of at most `length` tokens, the last of a text shorter.

    Prompt `a b`, then the model's `c d E`, length 3:

        tokens   a b c   d E
        written  0 0 1   1 1

    A piece without any token in the loss is left out. (The first token of a piece is
    never in the loss, because it has no context.)

    Args:
      texts: generated texts.
      rows: indices of the texts to yield.
      length: tokens of a piece.

    Yields:
      `[n, 2]` int32: each token, and 1 where the model wrote it.
    """
    for row in rows:
        tokens = texts[row]
        written = np.arange(len(tokens)) >= texts.prompt_lengths[row]
        text = np.stack([tokens, written], axis=-1)
        for start in range(0, len(text), length):
            piece = text[start : start + length]
            if piece[1:, 1].any():
                yield piece


def end_token(texts: Generations) -> int | None:
    """The end-of-text token that the texts were decoded with, if any."""
    options = texts.facts.get("options")
    end = options.get("end_of_text") if isinstance(options, dict) else None
    if isinstance(end, list) and end:
        end = end[0]
    return end if isinstance(end, int) and 0 <= end < texts.vocab_size else None
