"""Hash tables of n-grams, for histories with many extensions.

The upper bits of an entry are a part of the key's hash, the lower bits the n-gram's
index; -1 is an empty slot. A lookup usually reads one entry and compares one key.

This module needs numba; import it where it is used.
"""

from typing import Any

import numpy as np

from bpd_jax.ngrams.numba_kernels import njit

# Maximum number of extensions that are scanned linearly. Longer lists of extensions are
# in hash tables.
FEW = 16


@njit()
def _hash(key: int) -> np.uint64:
    return np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)


@njit()
def slot_of(key: int, bits: int) -> int:
    """The first slot of a key in a table of 2^bits slots: the hash's top bits."""
    slot: Any = np.int64(_hash(key) >> np.uint64(64 - bits))
    return slot


@njit()
def mark_of(key: int, bits: int, shift: int) -> int:
    """The upper part of an entry: the hash's bits that follow those of the slot."""
    mark: Any = np.int64((_hash(key) << np.uint64(bits)) >> np.uint64(1 + shift))
    return mark << shift


@njit()
def fill_table(
    table: np.ndarray,
    bits: int,
    shift: int,
    keys: np.ndarray,
    offsets: np.ndarray,
) -> None:
    """Inserts the n-grams of an order whose history has many extensions into a table.

    Args:
      table: `[2^bits]` int64, all -1; more slots than keys.
      bits: logarithm of the number of slots.
      shift: bits of an index.
      keys: `[n]` int64.
      offsets: the `trie.child_offsets` of the histories.
    """
    last = (1 << bits) - 1
    for parent in range(len(offsets) - 1):
        if offsets[parent + 1] - offsets[parent] <= FEW:
            continue
        for index in range(offsets[parent], offsets[parent + 1]):
            slot = slot_of(keys[index], bits)
            while table[slot] >= 0:
                slot = (slot + 1) & last
            table[slot] = mark_of(keys[index], bits, shift) | index


@njit()
def walk(
    table: np.ndarray,
    bits: int,
    shift: int,
    keys: np.ndarray,
    key: int,
    steps: int,
) -> int:
    """Returns the index of a key, or -1, starting `steps` after its first slot."""
    last = (1 << bits) - 1
    low = (1 << shift) - 1
    slot = (slot_of(key, bits) + steps) & last
    mark = mark_of(key, bits, shift)
    while table[slot] >= 0:
        entry = table[slot]
        if entry & ~low == mark and keys[entry & low] == key:
            return entry & low
        slot = (slot + 1) & last
    return -1
