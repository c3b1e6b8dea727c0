"""The states of a model: its histories, numbered for an automaton or a search."""

from collections.abc import Sequence

import numpy as np

from bpd_jax.ngrams import trie
from bpd_jax.ngrams.model import NGramModel


class StateTable:
    """Numbers the histories of a model 0 ... S-1, in the order of OpenGrm's states.

    A history is an n-gram with extensions or a back-off weight. The empty history
    (state 0) and, in a model of order 2 or more, `<s>` are always histories. States are
    numbered by order, and within an order as in `bpd_jax.ngrams.trie`.

    After any text the model's prediction depends only on the longest suffix that is a
    history. Worked example: with the trigrams `a b c` and `b c d`, the histories of two
    symbols are `a b` and `b c`. After `a b c` the state is `b c`; after `a b x` it is
    `x` if `x` has extensions, and otherwise 0.

    Attributes:
      num_states: S.
      start: state of the history `<s>`.
      numbers: per length 0 ... N-1, `[n]` int32, the state of each n-gram; -1 if it is
        not a history.
      reached: per length 0 ... N, `[n]` int32, the state after each n-gram.
      backoff_states: `[S]` int32, the state of each history without its first symbol;
        0 for state 0.
      backoff_weights: `[S]` float64, natural logarithm of each history's back-off
        weight; 0 for state 0.
    """

    def __init__(self, model: NGramModel) -> None:
        self._model = model
        keys, width = model.keys, model.width
        links = trie.suffix_links(keys, width)
        start = trie.find(keys[0], np.zeros(1, np.int64), np.array([model.bos]), width)
        root = np.zeros(1, np.int32)
        self.numbers = [root]
        self.reached = [root]
        states = 1
        backoff_states, backoff_weights = [root], [np.zeros(1)]
        for length in range(1, model.order):
            weights = model.log_backoffs[length - 1]
            is_history = trie.child_counts(keys, length, width) > 0
            # Models of other programs may have weights of n-grams without extensions.
            is_history |= weights != 0
            if length == 1 and start[0] >= 0:
                is_history[start[0]] = True
            numbers = np.full(is_history.size, -1, np.int32)
            size = int(np.count_nonzero(is_history))
            numbers[is_history] = np.arange(states, states + size)
            below = self.reached[length - 1][links[length - 1]]
            self.numbers.append(numbers)
            self.reached.append(np.where(is_history, numbers, below))
            backoff_states.append(below[is_history])
            backoff_weights.append(weights[is_history])
            states += size
        self.reached.append(self.reached[-1][links[-1]])
        self.num_states = states
        has_start = model.order > 1 and start[0] >= 0
        self.start = int(self.numbers[1][start[0]]) if has_start else 0
        self.backoff_states = np.concatenate(backoff_states)
        self.backoff_weights = np.concatenate(backoff_weights)

    def of_history(self, tokens: Sequence[int]) -> int:
        """Returns the state after `tokens`, the oldest first.

        A text begins with `<s>`, which is passed as `model.bos` or as the token
        `model.end_of_text`. Only the last N-1 tokens matter. Takes at most N(N-1)/2
        binary searches.
        """
        model = self._model
        recent = [
            model.bos if token == model.end_of_text else int(token)
            for token in tokens[max(0, len(tokens) - model.order + 1) :]
        ]
        for begin in range(len(recent)):
            index = 0
            for keys, token in zip(model.keys, recent[begin:], strict=False):
                key = index * model.width + token
                index = int(keys.searchsorted(key))
                if index == keys.size or keys[index] != key:
                    break
            else:
                state = int(self.numbers[len(recent) - begin][index])
                if state >= 0:
                    return state
        return 0
