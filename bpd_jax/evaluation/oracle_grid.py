"""The oracle for all lattice widths and numbers of heads at once."""

import numpy as np


def oracle_calls(candidates: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Serial calls of the oracle on one text (paper section 6.3, Figure 6).

    The oracle drafts the longest prefix of the text that the lattice contains. With
    heads 2 … h and k candidates of each, a call at position t yields token t, which is
    certain, and then the longest run of tokens t + 1, t + 2, … such that token
    t + j - 1 is among the first k candidates of head j.

    Worked example: the text `a b c`, L = 3 heads and K = 2 candidates. The block at
    position 0 has the candidates x, b of head 2 and c, x of head 3. With k = 1, head 2
    predicts x, and a call yields `a` alone; with k = 2 it yields `a b` if only head 2
    is used, and `a b c` with both. No call yields tokens past the end.

    Args:
      candidates: `[T, L - 1, K]`, candidates of heads 2 … L for the block that begins
        at each position t, best first: head j predicts token t + j - 1.
      tokens: `[T]`, the text.

    Returns:
      `[L - 1, K]` serial calls: row h - 2 is for heads 2 … h, column k - 1 for k
      candidates.
    """
    length, heads, width = candidates.shape
    yields = _yields(candidates, tokens)
    rows, columns = np.indices((heads, width))
    position = np.zeros((heads, width), int)
    calls = np.zeros((heads, width), int)
    while (running := position < length).any():
        current = np.minimum(position, length - 1)
        position += np.where(running, yields[current, rows, columns], 0)
        calls += running
    return calls


def _yields(candidates: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Tokens that a call at each position yields, `[T, L - 1, K]`."""
    length, heads, width = candidates.shape
    ahead = np.arange(length)[:, None] + 1 + np.arange(heads)
    inside = ahead < length
    true = tokens[np.minimum(ahead, length - 1)]
    hits = (candidates == true[:, :, None]) & inside[:, :, None]
    # The number of candidates needed to include the true token; width + 1 if none does.
    needed = np.where(hits.any(2), hits.argmax(2) + 1, width + 1)
    needed = np.maximum.accumulate(needed, axis=1)
    included = needed[:, :, None] <= np.arange(1, width + 1)
    return 1 + np.cumsum(included, axis=1)
