"""Training positions in generated texts, and the tokens that follow them.

A position is a token of a text; the heads predict from the model's state after that
token. The tokens after position i, y_0 … y_{L-1}, are those at i + 1 … i + L as far as
they are in the text; head j predicts y_{j-1}.
"""

import dataclasses

import numpy as np

from bpd_jax.data.generations import Generations


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """The positions of texts, in order; the last token of a text is not a position.

    Attributes:
      tokens: `[N]` int32, all texts concatenated.
      places: `[P]` int64, index of each position in `tokens`.
      rows: `[P]` int64, index of its text.
      starts: `[R+1]` int64: the positions of text r are `starts[r]` … `starts[r+1]-1`.
      offsets: `[R+1]` int64: text r is tokens `offsets[r]` … `offsets[r+1]-1`.
    """

    tokens: np.ndarray
    places: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.places)

    def after(self, indices: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens after n positions, `[n, count]` int32, and whether the text has them.

        Those past its end are arbitrary.
        """
        places = self.places[indices, None] + np.arange(1, count + 1)
        valid = places < self.offsets[self.rows[indices] + 1, None]
        return self.tokens[np.minimum(places, len(self.tokens) - 1)], valid


def positions_of(texts: Generations, include_prompts: bool) -> Positions:
    """The positions from the last token of each prompt on, or from its first token.

    Worked example: the texts `a b|c d e` and `f|g`, where | ends the prompt, have the
    positions b, c, d and f; b is followed by c d e, c by d e, d by e, and f by g.
    """
    counts = position_counts(texts.lengths, texts.prompt_lengths, include_prompts)
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(np.arange(len(texts)), counts)
    # The last position of a text is its last token but one.
    ends = texts.offsets[1:][rows]
    places = ends - 1 - (starts[1:][rows] - np.arange(len(rows)))
    return Positions(texts.tokens, places, rows, starts, texts.offsets)


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
    """Splits texts into training and held-out texts.

    Args:
      share: share of held-out texts; at least one text is held out.
      limit: highest number of held-out positions, which are evenly spaced.
      train_texts: highest number of training texts; a smaller number selects a subset
        of the texts of a larger one.

    Returns:
      Indices of the training positions and of the held-out positions, both ascending.
    """
    count = len(positions.starts) - 1
    order = np.random.default_rng((seed, 1)).permutation(count)
    held_out, rest = np.split(order, [max(1, round(share * count))])

    def positions_in(texts: np.ndarray) -> np.ndarray:
        return np.flatnonzero(np.isin(positions.rows, texts))

    return positions_in(rest[:train_texts]), spread(positions_in(held_out), limit)


def spread(indices: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` of the indices, evenly spaced."""
    kept = min(limit, len(indices))
    return indices[np.arange(kept) * len(indices) // max(kept, 1)]


# Neighbouring positions in a sample of those of training.
_RUN = 32


def training_sample(train: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Training positions to evaluate: as many as held-out ones, or all.

    They are runs of neighbours, spread over the texts, because a block drafter reads
    the states of a whole text for each group of positions.
    """
    count = min(len(train), len(held_out))
    runs = -(-count // _RUN)
    starts = np.arange(runs) * len(train) // max(runs, 1)
    sample = (starts[:, None] + np.arange(_RUN)).ravel()
    return train[np.unique(np.minimum(sample, len(train) - 1))[:count]]


def draft_vocabulary(frequencies: np.ndarray, size: int) -> np.ndarray:
    """The `size` most frequent tokens, int32, in ascending order.

    Lower ids take precedence among equally frequent tokens.

    >>> draft_vocabulary(np.array([3, 0, 5, 3, 1]), 3).tolist()
    [0, 2, 3]
    """
    best = np.argsort(-frequencies, kind="stable")[:size]
    return np.sort(best).astype(np.int32)


# A window is 262,144 positions: 300 MB of states of width 576.
_BLOCK, _WINDOW = 64, 4096


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """A random order of 0 … `count` - 1 that is cheap to read from disk.

    Runs of 64 neighbours are in random order, and windows of 4096 runs are shuffled.
    With smaller windows, successive batches would come from few texts, and the heads
    would overfit to them.
    """
    rng = np.random.default_rng((seed, 2, epoch))
    runs = rng.permutation(-(-count // _BLOCK))
    order = (runs[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
    order = order[order < count]
    for first in range(0, count, _BLOCK * _WINDOW):
        rng.shuffle(order[first : first + _BLOCK * _WINDOW])
    return order
