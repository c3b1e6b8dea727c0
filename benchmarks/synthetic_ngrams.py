"""A synthetic 4-gram model of any size, to measure memory and search without a corpus.

It has the structure of a real one: Zipf unigrams, and the prefix and suffix of every
n-gram are n-grams. Its probabilities are random and are not normalised, which does not
affect the time of a search.
"""

import numpy as np

from bpd_jax.base import progress
from bpd_jax.ngrams import trie
from bpd_jax.ngrams.model import NGramModel

# Shares of bigrams, trigrams and 4-grams, as in a pruned model of a large corpus.
SHARES = (0.15, 0.4, 0.45)


def synthetic_model(num_ngrams: int, vocab_size: int, seed: int = 0) -> NGramModel:
    """Makes a 4-gram model of about `num_ngrams` n-grams over V tokens."""
    rng = np.random.default_rng(seed)
    width = trie.symbol_width(vocab_size)
    frequency = 1.0 / np.arange(10, 10 + vocab_size)
    frequency /= frequency.sum()
    cumulative = np.cumsum(frequency)

    def tokens(number: int) -> np.ndarray:
        drawn = np.searchsorted(cumulative, rng.random(number))
        return np.minimum(drawn, vocab_size - 1)

    keys = [np.append(np.arange(vocab_size), [vocab_size, vocab_size + 1])]
    # Index of the suffix of every n-gram in the next lower order.
    suffixes = np.zeros(keys[0].size, np.int64)
    first = np.array([0, vocab_size])
    for share in progress.bar(SHARES, label="make up", unit=" orders"):
        wanted = int(share * num_ngrams)
        # More draws than needed, because they contain duplicates.
        number = int(wanted * 1.6)
        if len(keys) == 1:
            parents, children = tokens(number), tokens(number)
            last_symbols = children
        else:
            # The successors of a parent are successors of its suffix.
            parents = np.floor(keys[-1].size * rng.random(number) ** 1.5).astype(int)
            below = suffixes[parents]
            begin, end = first[below], first[below + 1]
            children = begin + np.floor((end - begin) * rng.random(number)).astype(int)
            fits = begin < end
            parents, children = parents[fits], children[fits]
            last_symbols = keys[-1][children] % width
        ngram_keys, places = np.unique(
            parents * width + last_symbols, return_index=True
        )
        if ngram_keys.size > wanted:
            kept = np.sort(rng.permutation(ngram_keys.size)[:wanted])
            ngram_keys, places = ngram_keys[kept], places[kept]
        first = np.zeros(keys[-1].size + 1, np.int64)
        np.cumsum(
            np.bincount(ngram_keys // width, minlength=keys[-1].size), out=first[1:]
        )
        keys.append(ngram_keys)
        suffixes = children[places]
    log_probs = [np.log(np.append(frequency, [1e-3, 1.0]))]
    log_probs[0][-1] = -np.inf
    log_probs += [-rng.exponential(2.5, level.size) for level in keys[1:]]
    return NGramModel(
        vocab_size=vocab_size,
        keys=tuple(keys),
        log_probs=tuple(log_probs),
        log_backoffs=tuple(-rng.exponential(0.7, level.size) for level in keys[:-1]),
    )
