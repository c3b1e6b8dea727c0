"""The sorted arrays that n-gram counts and models share.

Symbols of a vocabulary of V tokens: 0 ... V-1 are the tokens, V is `</s>`, V+1 is
`<s>`; `width = V + 2`. The n-grams of one order are one sorted int64 array of keys:

    key = (index of the n-gram's first n-1 symbols in the order below) * width
          + last symbol

where the empty history has index 0. So keys of order 1 are symbols, the n-grams of
every order are in lexicographic order, the extensions of one history are neighbours,
and finding an n-gram takes one binary search per symbol. Eight bytes hold an n-gram
of any order; the arrays can be memory-mapped.

Worked example (V = 3, width = 5, sentences `0 1` and `0`):

    order 1: 0, 1, </s>=3, <s>=4        keys [0, 1, 3, 4]
    order 2: 0 1, 0 </s>, 1 </s>, <s> 0 keys [0*5+1, 0*5+3, 1*5+3, 3*5+0]

Two closures hold everywhere: the prefix (without the last symbol) and the suffix
(without the first) of an n-gram are in the order below.
"""

from collections.abc import Sequence

import numpy as np

Keys = tuple[np.ndarray, ...]


def eos_symbol(vocab_size: int) -> int:
    """Returns the symbol of `</s>`."""
    return vocab_size


def bos_symbol(vocab_size: int) -> int:
    """Returns the symbol of `<s>`."""
    return vocab_size + 1


def symbol_width(vocab_size: int) -> int:
    """Returns how many symbols there are."""
    return vocab_size + 2


def find(
    keys: np.ndarray, parents: np.ndarray, symbols: np.ndarray, width: int
) -> np.ndarray:
    """Returns where the n-grams `parents + symbols` are, -1 for those that are not.

    Args:
      keys: `[n]` int64, the keys of one order.
      parents: indices in the order below; -1 has no extension.
      symbols: last symbols, of a shape that broadcasts with `parents`; -1 is none.
      width: number of symbols.
    """
    wanted = np.asarray(parents, np.int64) * width + symbols
    if not keys.size:
        return np.full(wanted.shape, -1, np.int64)
    index = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    found = (keys[index] == wanted) & (np.asarray(parents) >= 0)
    return np.where(found & (np.asarray(symbols) >= 0), index, -1)


def suffix_links(keys: Sequence[np.ndarray], width: int) -> list[np.ndarray]:
    """Returns for every n-gram the index of its suffix in the order below.

    The suffix of `a b c` is `b c`; that of `a` is the empty history, index 0. An
    n-gram without its suffix gets -1, which the closures rule out.
    """
    links = [np.zeros(keys[0].size, np.int64)]
    for order in range(1, len(keys)):
        parents, symbols = np.divmod(keys[order], width)
        links.append(find(keys[order - 1], links[-1][parents], symbols, width))
    return links


def child_counts(keys: Sequence[np.ndarray], order: int, width: int) -> np.ndarray:
    """Returns how many extensions each n-gram of `order` (1, 2, ...) has, `[n]`."""
    if order == len(keys):
        return np.zeros(keys[-1].size, np.int64)
    return np.bincount(keys[order] // width, minlength=keys[order - 1].size)


def closed_under_affixes(
    keys: Sequence[np.ndarray], keep: Sequence[np.ndarray], width: int
) -> list[np.ndarray]:
    """Returns `keep`, widened to the prefixes and suffixes of what it keeps."""
    keep = [mask.copy() for mask in keep]
    links = suffix_links(keys, width)
    for order in range(len(keys) - 1, 0, -1):
        kept = keep[order]
        keep[order - 1][keys[order][kept] // width] = True
        keep[order - 1][links[order][kept]] = True
    return keep


def select(keys: Sequence[np.ndarray], keep: Sequence[np.ndarray], width: int) -> Keys:
    """Returns the keys of the n-grams with a true mask, renumbered.

    Orders that lose every n-gram are left out; they are the highest, because `keep`
    must be closed under prefixes.
    """
    selected: list[np.ndarray] = [keys[0][keep[0]]]
    for order in range(1, len(keys)):
        if not keep[order].any():
            break
        new_index = np.cumsum(keep[order - 1]) - 1
        parents, symbols = np.divmod(keys[order][keep[order]], width)
        selected.append(new_index[parents] * width + symbols)
    return tuple(selected)


def ngrams(keys: Sequence[np.ndarray], order: int, width: int) -> np.ndarray:
    """Returns the symbols of all n-grams of `order` (1, 2, ...), `[n, order]` int32."""
    columns = []
    index = np.arange(keys[order - 1].size)
    for level in range(order - 1, -1, -1):
        index, symbols = np.divmod(keys[level][index], width)
        columns.append(symbols.astype(np.int32))
    return np.stack(columns[::-1], axis=1)
