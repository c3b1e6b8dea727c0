"""Compiled loop of `bpd_jax.ngrams.sample`."""

import numba
import numpy as np

from bpd_jax.ngrams.trie_kernels import lower_bound


@numba.njit(cache=True, nogil=True)
def _child(
    keys: np.ndarray, offsets: np.ndarray, parent: int, symbol: int, width: int
) -> int:
    """Returns the place of `parent + symbol`, -1 if it is not there."""
    if parent < 0:
        return -1
    wanted, last = parent * width + symbol, offsets[parent + 1]
    place = lower_bound(keys, offsets[parent], last, wanted)
    return place if place < last and keys[place] == wanted else -1


@numba.njit(cache=True, nogil=True)
def _draw(
    keys: tuple[np.ndarray, ...],
    offsets: tuple[np.ndarray, ...],
    probs: tuple[np.ndarray, ...],
    unigram_sums: np.ndarray,
    histories: np.ndarray,
    width: int,
    rng: np.random.Generator,
) -> int:
    """Draws the symbol that follows, see `sample`.

    Args:
      keys: per order, the n-grams.
      offsets: per order from 0, where the extensions begin.
      probs: per order, the probabilities.
      unigram_sums: the unigrams' probabilities, summed up from the first.
      histories: the history of 0, 1, ... N-1 symbols, -1 from the first not known.
      width: number of symbols.
      rng: where chance comes from.
    """
    top = 0
    while top + 1 < histories.size and histories[top + 1] >= 0:
        top += 1
    events = np.count_nonzero(probs[0])
    level = top
    while True:
        # Try the extensions of the history at hand.
        drawn = -1
        if level == 0:
            chance = rng.random() * unigram_sums[-1]
            drawn = np.searchsorted(unigram_sums, chance, side="right")
        else:
            begin = offsets[level][histories[level]]
            end = offsets[level][histories[level] + 1]
            chance = rng.random()
            for ngram in range(begin, end):
                chance -= probs[level][ngram]
                if chance < 0:
                    drawn = ngram
                    break
            if drawn < 0 and end - begin == events:
                drawn = end - 1  # Rounding: there is nothing else.
        if drawn < 0:
            level -= 1
            continue
        symbol = keys[level][drawn] % width
        # A longer history backed off, which it does for other symbols than its own.
        while level < top:
            if (
                _child(
                    keys[level + 1],
                    offsets[level + 1],
                    histories[level + 1],
                    symbol,
                    width,
                )
                >= 0
            ):
                break
            level += 1
        if level == top:
            return symbol


@numba.njit(cache=True, nogil=True)
def fill_samples(
    keys: tuple[np.ndarray, ...],
    offsets: tuple[np.ndarray, ...],
    probs: tuple[np.ndarray, ...],
    unigram_sums: np.ndarray,
    start: np.ndarray,
    width: int,
    eos: int,
    rng: np.random.Generator,
    tokens: np.ndarray,
    lengths: np.ndarray,
) -> None:
    """Writes one sequence per row of `tokens`, and its length; the rest as `_draw`."""
    histories = np.empty_like(start)
    for row in range(tokens.shape[0]):
        histories[:] = start
        lengths[row] = tokens.shape[1] + 1  # not ended
        for place in range(tokens.shape[1] + 1):
            symbol = _draw(keys, offsets, probs, unigram_sums, histories, width, rng)
            if symbol == eos:
                lengths[row] = place
                break
            if place == tokens.shape[1]:
                break
            tokens[row, place] = symbol
            for length in range(histories.size - 1, 0, -1):
                histories[length] = _child(
                    keys[length - 1],
                    offsets[length - 1],
                    histories[length - 1],
                    symbol,
                    width,
                )
