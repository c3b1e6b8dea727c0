"""A pseudo-random permutation that needs no table, for very many rows.

Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains": a Feistel network
permutes the numbers of 2b bits. It is applied again to results that are too large
(cycle walking), which gives a permutation of the smaller numbers.
"""

import numpy as np

_ROUNDS = 6
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Permutation:
    """A permutation of 0 … size - 1, determined by a seed, in constant memory."""

    def __init__(self, size: int, seed: tuple[int, ...]) -> None:
        """Draws the keys; `size` is at least 1."""
        self._size = np.uint64(size)
        # The domain is at most four times as large as `size`, so that walks are short.
        half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half)
        self._mask = np.uint64(2**half - 1)
        rng = np.random.default_rng(seed)
        self._keys = rng.integers(0, 2**64, _ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Returns the elements at `positions`; both are `[n]` int64."""
        result = self._network(np.asarray(positions).astype(np.uint64))
        while (outside := result >= self._size).any():
            result[outside] = self._network(result[outside])
        return result.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return left << self._half | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """Mixes the bits of numbers, as the finalizer of splitmix64."""
    values = (values ^ values >> np.uint64(30)) * _MIX[0]
    values = (values ^ values >> np.uint64(27)) * _MIX[1]
    return values ^ values >> np.uint64(31)
