"""Splits generated texts into train and validation, and into pieces of tokens.

Texts are used unchanged: a text begins with its prompt, as in decoding, and ends with
the end-of-text token unless generation was stopped by the maximum length. The generated
tokens contribute to the loss; the prompt is context.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from bpd_jax.data.corpora import EmptySplitError, split_of
from bpd_jax.data.generations import Generations
from bpd_jax.data.text_task import ALL


def split_texts(
    texts: Generations, split: str, validation_fraction: float
) -> list[int]:
    """Returns the indices of the texts of a split, in ascending order.

    The split of a text depends only on its tokens, so that equal texts are in the same
    split, and adding texts does not change the split of others.

    Args:
      texts: generated texts.
      split: `train`, `validation`, or `all` for both.
      validation_fraction: share of the texts held out for validation.
    """
    rows = [
        row
        for row in range(len(texts))
        if split in (ALL, split_of(_key(texts[row]), validation_fraction))
    ]
    if not rows:
        raise EmptySplitError(
            f"none of the {len(texts)} texts of {texts.folder} falls into the {split} "
            f"split at validation_fraction={validation_fraction}",
            "generate more texts.",
        )
    return rows


def _key(text: np.ndarray) -> str:
    return text.astype("<i4").tobytes().hex()


def cut_texts(
    texts: Generations, rows: Iterable[int], length: int
) -> Iterator[np.ndarray]:
    """Splits texts into pieces of `length` tokens; the last piece may be shorter.

    Worked example: the prompt `a b`, the generated tokens `c d E`, and length 3.

        tokens     a b c   d E
        generated  0 0 1   1 1

    Pieces without a token in the loss are omitted. (The first token of a piece is never
    in the loss, because it has no context.)

    Args:
      texts: generated texts.
      rows: indices of the texts to split.
      length: tokens of a piece.

    Yields:
      `[n, 2]` int32: each token, and 1 if the model generated it.
    """
    for row in rows:
        tokens = texts[row]
        generated = np.arange(len(tokens)) >= texts.prompt_lengths[row]
        text = np.stack([tokens, generated], axis=-1)
        for start in range(0, len(text), length):
            piece = text[start : start + length]
            if piece[1:, 1].any():
                yield piece


def end_token(texts: Generations) -> int | None:
    """The end-of-text token that was used in decoding, or None."""
    options = texts.facts.get("options")
    end = options.get("end_of_text") if isinstance(options, dict) else None
    if isinstance(end, list) and end:
        end = end[0]
    return end if isinstance(end, int) and 0 <= end < texts.vocab_size else None
