"""A trie of n-grams as sorted arrays, which counts and models share.

The symbols of a vocabulary of V tokens are the tokens 0 ... V-1, `</s>` = V and
`<s>` = V+1; `width = V + 2`. The n-grams of one order are one sorted int64 array of
keys:

    key = (index of the n-gram's first n-1 symbols in the order below) * width
          + last symbol

where the empty history has index 0. Therefore the keys of order 1 are symbols, the
n-grams of every order are in lexicographic order, the extensions of a history are
adjacent, and a lookup takes one binary search per symbol. An n-gram of any order takes
eight bytes; the arrays can be memory-mapped.

Worked example (V = 3, width = 5, sentences `0 1` and `0`):

    order 1: 0, 1, </s>=3, <s>=4        keys [0, 1, 3, 4]
    order 2: 0 1, 0 </s>, 1 </s>, <s> 0 keys [0*5+1, 0*5+3, 1*5+3, 3*5+0]

The n-grams are closed under prefixes (without the last symbol) and suffixes (without
the first symbol): both are in the order below.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import parallel

Keys = tuple[np.ndarray, ...]

# More than any tokenizer has. With this limit, arrays with an entry per token are
# small, and keys can represent 2^39 histories.
MOST_TOKENS = 1 << 24

# Minimum number of n-grams per thread.
_THREAD_SIZE = 1 << 17


def eos_symbol(vocab_size: int) -> int:
    """Returns the symbol of `</s>`."""
    return vocab_size


def bos_symbol(vocab_size: int) -> int:
    """Returns the symbol of `<s>`."""
    return vocab_size + 1


def symbol_width(vocab_size: int) -> int:
    """Returns the number of symbols, V + 2."""
    return vocab_size + 2


def check_vocab_size(vocab_size: int, name: object = "vocab_size") -> None:
    """Checks that V is at most `MOST_TOKENS`.

    Args:
      name: the file or parameter to name in the error message.
    """
    if vocab_size > MOST_TOKENS:
        raise UserError(
            f"{name}: a vocabulary of {vocab_size:,} tokens, with ids up to "
            f"{vocab_size - 1}, is more than the {MOST_TOKENS:,} that are supported: "
            "check the ids."
        )


def in_threads(
    offsets: np.ndarray, function: Callable[..., None], *arguments: Any
) -> None:
    """Calls `function(*arguments, begin, end)` in threads, for ranges of parents.

    The ranges have about equal numbers of extensions.

    Args:
      offsets: `[parents + 1]`, see `child_offsets`.
      function: a compiled loop, which releases the interpreter lock.
      arguments: its first arguments.
    """
    parents, children = offsets.size - 1, int(offsets[-1])
    threads = min(parallel.cores(), 1 + children // _THREAD_SIZE)
    if threads == 1:
        function(*arguments, 0, parents)
        return
    # More ranges than threads, because the work per extension differs.
    shares = np.linspace(0, children, 4 * threads + 1, dtype=np.int64)[1:-1]
    cuts = np.unique([0, *np.searchsorted(offsets, shares), parents]).tolist()
    ranges = itertools.pairwise(cuts)
    for _ in parallel.in_order(
        lambda part: function(*arguments, *part), ranges, threads
    ):
        pass


def find(
    keys: np.ndarray,
    parents: np.ndarray,
    symbols: np.ndarray,
    width: int,
    offsets: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the indices of the n-grams `parents + symbols`, -1 for missing ones.

    Args:
      keys: `[n]` int64, the keys of one order.
      parents: indices in the order below; -1 for none.
      symbols: last symbols, of a shape that broadcasts with `parents`; -1 for none.
      offsets: the `child_offsets` of the order below. With them, millions of queries
        are several times faster.
    """
    if offsets is not None:
        from bpd_jax.ngrams import trie_kernels

        parents, symbols = (
            np.ascontiguousarray(array, np.int64)
            for array in np.broadcast_arrays(parents, symbols)
        )
        indices = np.empty(parents.shape, np.int64)
        trie_kernels.fill_children(
            keys, offsets, parents.ravel(), symbols.ravel(), width, indices.reshape(-1)
        )
        return indices
    target = np.asarray(parents, np.int64) * width + symbols
    if not keys.size:
        return np.full(target.shape, -1, np.int64)
    index = np.minimum(np.searchsorted(keys, target), keys.size - 1)
    exists = (keys[index] == target) & (np.asarray(parents) >= 0)
    return np.where(exists & (np.asarray(symbols) >= 0), index, -1)


def child_offsets(keys: Sequence[np.ndarray], order: int, width: int) -> np.ndarray:
    """Returns the offsets of the extensions of each n-gram of `order`, `[n + 1]` int64.

    The extensions of n-gram i are `keys[order][offsets[i] : offsets[i + 1]]`. Order 0
    is the empty history, whose extensions are the unigrams.
    """
    parents = keys[order - 1].size if order else 1
    offsets = np.zeros(parents + 1, np.int64)
    if order < len(keys):
        from bpd_jax.ngrams import trie_kernels

        trie_kernels.fill_offsets(keys[order], width, offsets)
    return offsets


def suffix_links(keys: Sequence[np.ndarray], width: int) -> list[np.ndarray]:
    """Returns, per order, the index of each n-gram's suffix in the order below, `[n]`.

    The suffix of `a b c` is `b c`; that of `a` is the empty history, index 0. The index
    of a missing suffix is -1; there is none if the n-grams are closed under suffixes.
    """
    from bpd_jax.ngrams import trie_kernels

    links = [np.zeros(keys[0].size, np.int64)]
    lower = child_offsets(keys, 0, width)
    for order in range(1, len(keys)):
        offsets = child_offsets(keys, order, width)
        targets = np.empty(keys[order].size, np.int64)
        level, level_below = (keys[order], offsets), (keys[order - 1], lower)
        fill = trie_kernels.fill_suffix_links
        in_threads(offsets, fill, level, level_below, links[-1], width, targets)
        links.append(targets)
        lower = offsets
    return links


def select(keys: Sequence[np.ndarray], keep: Sequence[np.ndarray], width: int) -> Keys:
    """Returns the keys of the n-grams whose mask is true, renumbered.

    `keep` must be closed under prefixes. Orders without n-grams, which are the highest,
    are omitted.
    """
    selected: list[np.ndarray] = [keys[0][keep[0]]]
    for order in range(1, len(keys)):
        if not keep[order].any():
            break
        new_index = np.cumsum(keep[order - 1]) - 1
        parents, symbols = np.divmod(keys[order][keep[order]], width)
        selected.append(new_index[parents] * width + symbols)
    return tuple(selected)


def ngrams(
    keys: Sequence[np.ndarray],
    order: int,
    width: int,
    part: slice = slice(None),
) -> np.ndarray:
    """Returns the symbols of n-grams of `order` (1, 2, ...), `[n, order]` int32.

    Args:
      order: the order of the n-grams to return.
      part: slice of the n-grams, without a step; by default all.
    """
    columns = []
    index = np.arange(*part.indices(keys[order - 1].size))
    for level in range(order - 1, -1, -1):
        index, symbols = np.divmod(keys[level][index], width)
        columns.append(symbols.astype(np.int32))
    return np.stack(columns[::-1], axis=1)
