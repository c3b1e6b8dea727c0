"""Which positions of generated texts heads are trained at, and what they guess there.

A position is a token of a text whose state, once the model has read it, the heads start
from. Position i of a text of n tokens has the tokens y_0 … y_{L-1} after it, i + 1 …
i + L, as far as they lie in the text; head j guesses y_{j-1}.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from bpd_jax.data.generations import Generations


class After(NamedTuple):
    """What follows some positions.

    Attributes:
      tokens: `[n, L]` int32, y_0 … y_{L-1}; past the end of the text some token.
      valid: `[n, L]` bool, whether they lie in the text.
    """

    tokens: np.ndarray
    valid: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """The positions of some texts, text by text, each from `first` to its last but one.

    Attributes:
      tokens: `[N]` int32, all texts joined.
      places: `[P]` int64, where each position lies in `tokens`.
      ends: `[P]` int64, where its text ends.
      rows: `[P]` int64, the number of its text.
      starts: `[R+1]` int64: the positions of text r are `starts[r]` … `starts[r+1]`.
      offsets: `[R]` int64, where each text begins in `tokens`.
    """

    tokens: np.ndarray
    places: np.ndarray
    ends: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.places)

    def after(self, indices: np.ndarray, count: int) -> After:
        """The `count` tokens after each of some positions."""
        places = self.places[indices, None] + np.arange(1, count + 1)
        valid = places < self.ends[indices, None]
        return After(self.tokens[np.minimum(places, len(self.tokens) - 1)], valid)


def positions_of(texts: Generations, include_prompts: bool) -> Positions:
    """The positions that count: from the last token of the prompt, or from the first.

    Worked example: the texts `a b|c d e` and `f|g` (| ends the prompt) have positions
    b, c, d and f; b has y = c d e, c has d e, d has e, and f has g.

    Args:
      texts: generated texts.
      include_prompts: whether positions in prompts count as well.
    """
    counts = position_counts(texts.lengths, texts.prompt_lengths, include_prompts)
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(np.arange(len(texts)), counts)
    # The last position of a text is its last token but one.
    ends = texts.offsets[1:][rows]
    places = ends - 1 - (starts[1:][rows] - np.arange(len(rows)))
    return Positions(texts.tokens, places, ends, rows, starts, texts.offsets[:-1])


def position_counts(
    lengths: np.ndarray, prompt_lengths: np.ndarray, include_prompts: bool
) -> np.ndarray:
    """`[R]` int64: number of positions of each text."""
    first = 0 if include_prompts else np.maximum(prompt_lengths.astype(np.int64) - 1, 0)
    return np.maximum(lengths - 1 - first, 0)


def split_texts(
    positions: Positions,
    share: float,
    limit: int,
    seed: int,
    train_texts: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Positions to train at, and those of held-out texts to measure at.

    Args:
      positions: of all texts.
      share: of the texts that are held out, at least one text.
      limit: positions of held-out texts that are measured, at most, spread evenly.
      seed: of the choice.
      train_texts: texts to train on, at most; of two numbers the smaller one names
        some of the texts of the larger one.

    Returns:
      Two arrays of indices into `positions`, both ascending.
    """
    count = len(positions.starts) - 1
    order = np.random.default_rng((seed, 1)).permutation(count)
    held_out, rest = np.split(order, [max(1, round(share * count))])

    def positions_in(texts: np.ndarray) -> np.ndarray:
        picked = np.zeros(count, bool)
        picked[texts] = True
        return np.flatnonzero(picked[positions.rows])

    measured = spread(positions_in(held_out), limit)
    return positions_in(rest[:train_texts]), measured


def spread(indices: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` of some indices, spread evenly."""
    kept = min(limit, len(indices))
    return indices[np.arange(kept) * len(indices) // max(kept, 1)]


def draft_vocabulary(frequencies: np.ndarray, size: int) -> np.ndarray:
    """The `size` most frequent tokens, int32, in ascending order.

    Among equally frequent ones the lower ids are taken.

    >>> draft_vocabulary(np.array([3, 0, 5, 3, 1]), 3).tolist()
    [0, 2, 3]
    """
    best = np.argsort(-frequencies, kind="stable")[:size]
    return np.sort(best).astype(np.int32)


# A window is 262,144 positions: 300 MB of states of width 576.
_BLOCK, _WINDOW = 64, 4096


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """All of 0 … `count` - 1 in a random order that is cheap to read from disk.

    Runs of 64 neighbours come in random order, and the members of 4096 such runs are
    shuffled among themselves. Batches that follow each other have to come from very
    many texts: heads learn the few texts of a smaller window by heart.
    """
    rng = np.random.default_rng((seed, 2, epoch))
    runs = rng.permutation(-(-count // _BLOCK))
    order = (runs[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
    order = order[order < count]
    for first in range(0, count, _BLOCK * _WINDOW):
        rng.shuffle(order[first : first + _BLOCK * _WINDOW])
    return order
