"""Tokens of examples and documents as pieces to pack. Needs only numpy.

An example is its inputs, which are context, then its targets, which are learnt. Inputs
`E a b c s` (E ends a text, s is the separator) and targets `x y E`:

    tokens   E a b c s x y E
    learnt   0 0 0 0 0 1 1 1
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from bpd_jax.errors import UserError


@dataclasses.dataclass
class Cut:
    """Counts of what did not fit into rows.

    Attributes:
      inputs: number of examples whose inputs were truncated.
      targets: number of examples whose targets were truncated as well.
      tokens: number of tokens left out.
    """

    inputs: int = 0
    targets: int = 0
    tokens: int = 0


def join_examples(
    examples: Iterable[Mapping[str, np.ndarray]], length: int, separator: int, cut: Cut
) -> Iterator[np.ndarray]:
    """Yields every example as one piece of at most `length` tokens.

    If an example is too long, its inputs lose their last tokens before the separator.
    If only E and the separator are left of them, the targets lose their last tokens,
    including the final E. The example above in shorter rows:

        length 7   E a b s x y E
        length 5   E s x y E
        length 4   E s x y

    Args:
      examples: `inputs` `[m]`, from E to separator, and `targets` `[n]`, to E.
      length: tokens of a row.
      separator: tokens of the separator.
      cut: counts, updated in place.

    Yields:
      `[p, 2]` int32: each token, and 1 where it is learnt.

    Raises:
      UserError: `length` leaves no room for a target.
    """
    frame = 1 + separator
    if length <= frame:
        raise UserError(
            f"length is {length}: inputs and separator alone take {frame} tokens of a "
            "row."
        )
    for example in examples:
        inputs, targets = example["inputs"], example["targets"]
        before = len(inputs) + len(targets)
        if before > length:
            targets_kept = targets[: length - frame]
            inputs_kept = length - len(targets_kept) - separator
            cut.targets += len(targets_kept) < len(targets)
            cut.inputs += inputs_kept + separator < len(inputs)
            cut.tokens += before - length
            tail = inputs[len(inputs) - separator :]
            inputs = np.concatenate([inputs[:inputs_kept], tail])
            targets = targets_kept
        piece = np.zeros((len(inputs) + len(targets), 2), np.int32)
        piece[: len(inputs), 0] = inputs
        piece[len(inputs) :, 0] = targets
        piece[len(inputs) :, 1] = 1
        yield piece


def cut_documents(documents: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """Yields consecutive pieces of each document; the last one may be shorter.

    Args:
      documents: `[n]` ids each.
      length: tokens of a piece.

    Yields:
      `[p]` ids.
    """
    for tokens in documents:
        for start in range(0, len(tokens), length):
            yield tokens[start : start + length]
