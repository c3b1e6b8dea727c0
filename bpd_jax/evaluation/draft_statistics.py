"""Statistics of drafts, and the serial calls of the oracle."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bpd_jax.decoding.generate import Generation


@dataclasses.dataclass(frozen=True)
class DraftStatistics:
    """Statistics of a method's drafts over all serial calls.

    Attributes:
      nodes: mean number of distinct prefixes that a call verifies.
      repeated: share of equal neighbouring tokens in the best-scored draft (paper
        section 6.1, "% consecutive"); None for drafts of one token.
      longest_run: length of the longest run of one token ("max run"), mean over the
        drafts of at least two tokens; None for drafts of one token.
      entropies: mean entropy in nats of each head that provided candidates, head 2
        first; empty without heads.
      accepted: share of calls that accept 1, 2, … L tokens.
    """

    nodes: float
    repeated: float | None
    longest_run: float | None
    entropies: tuple[float, ...]
    accepted: tuple[float, ...]


def draft_statistics(generations: Sequence[Generation]) -> DraftStatistics:
    """Statistics over the calls of all prompts."""
    proposed = np.concatenate([g.proposed for g in generations])
    entropies = np.concatenate([g.entropies for g in generations])[:, 1:]
    accepted = np.concatenate([g.accepted for g in generations])
    nodes = np.concatenate([g.nodes for g in generations])
    heads = np.isfinite(entropies).any(axis=0)
    means = [float(np.nanmean(column)) for column in entropies[:, heads].T]
    repeated, runs = repetition(proposed)
    counts = np.bincount(accepted, minlength=proposed.shape[1] + 1)[1:]
    calls = max(len(accepted), 1)
    return DraftStatistics(
        nodes=float(nodes.sum() / calls),
        repeated=repeated,
        longest_run=runs,
        entropies=tuple(means),
        accepted=tuple((counts / calls).tolist()),
    )


def repetition(drafts: np.ndarray) -> tuple[float | None, float | None]:
    """Share of equal neighbours, and mean longest run (paper section 6.1, Table 3).

    Drafts of one token are left out.

    Worked example: `a a a b` and `a b c d` have 2 equal pairs of 6, and longest runs
    of 3 and 1, so 1/3 and 2.

    Args:
      drafts: `[calls, L]`, -1 past the end of a draft.

    Returns:
      (None, None) if no draft has two tokens.
    """
    pairs = ((drafts[:, 1:] >= 0) & (drafts[:, :-1] >= 0)).sum(axis=1)
    if not pairs.any():
        return None, None
    equal, longest = repeats(drafts)
    return int(equal.sum()) / int(pairs.sum()), float(longest[pairs > 0].mean())


def repeats(drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number of equal neighbours and length of the longest run of each draft.

    Args:
      drafts: `[calls, L]`, -1 past the end of a draft.

    Returns:
      Two arrays `[calls]`.
    """
    equal = (drafts[:, 1:] >= 0) & (drafts[:, 1:] == drafts[:, :-1])
    run = longest = np.ones(len(drafts), int)
    for column in equal.T:
        run = np.where(column, run + 1, 1)
        longest = np.maximum(longest, run)
    return equal.sum(axis=1), longest


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
