"""Converts examples and documents to pieces of tokens, which are packed into rows.

The piece of an example consists of its inputs, which are context, and its targets,
which contribute to the loss. Inputs `E a b c s` (E is the end-of-text token, s the
separator) and targets `x y E` become

    tokens   E a b c s x y E
    in loss  0 0 0 0 0 1 1 1
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from bpd_jax.base.errors import UserError


@dataclasses.dataclass
class Truncation:
    """Counts of truncated examples.

    Attributes:
      inputs: number of examples whose inputs were truncated.
      targets: number of examples whose targets were truncated as well.
      tokens: number of omitted tokens.
    """

    inputs: int = 0
    targets: int = 0
    tokens: int = 0


def join_examples(
    examples: Iterable[Mapping[str, np.ndarray]],
    length: int,
    separator: int,
    truncation: Truncation,
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
      truncation: counts, updated in place.

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
            truncation.targets += len(new_targets) < len(targets)
            truncation.inputs += num_inputs + separator < len(inputs)
            truncation.tokens += excess
            separator_tokens = inputs[len(inputs) - separator :]
            inputs = np.concatenate([inputs[:num_inputs], separator_tokens])
            targets = new_targets
        piece = np.zeros((len(inputs) + len(targets), 2), np.int32)
        piece[: len(inputs), 0] = inputs
        piece[len(inputs) :, 0] = targets
        piece[len(inputs) :, 1] = 1
        yield piece


def cut_documents(documents: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """Splits documents into consecutive pieces; the last one may be shorter.

    Args:
      documents: arrays of `[n]` ids.
      length: tokens of a piece.

    Yields:
      `[p]` ids.
    """
    for tokens in documents:
        for start in range(0, len(tokens), length):
            yield tokens[start : start + length]
