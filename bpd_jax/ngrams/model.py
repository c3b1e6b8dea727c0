"""Back-off n-gram models as sorted arrays, and their probabilities."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import storage, trie
from bpd_jax.ngrams.backoff import context_sums, log_backoffs
from bpd_jax.ngrams.storage import FLOATS, NGramArrays

# Natural logarithm of the highest probability of an unseen token.
HIGHEST_UNSEEN = -50.0

# Log-probability of unseen n-grams where every path needs a score (paper, appendix D).
_UNSEEN = -1000.0


@dataclasses.dataclass(frozen=True, eq=False)
class NGramModel(NGramArrays):
    """A back-off model of orders 1 ... N over a vocabulary of V tokens.

    `bpd_jax.ngrams.trie` describes the layout. All logarithms are natural (ARPA files
    use base 10) and float64, so that a model sums to one in every context to about
    1e-12, also after pruning.

    A model of documents may identify one token with the sentence boundaries: with
    `end_of_text = e`, predicting e means predicting `</s>`, and e in a context stands
    for `<s>`. In a stream of documents, the e that ends a document thus begins the next
    one. Without `end_of_text`, the boundaries are only the symbols `eos` and `bos`,
    which are accepted as tokens and in contexts.

    Attributes:
      vocab_size: V.
      keys: per order, `[n]` int64.
      log_probs: per order, `[n]` float64, log P(last symbol | the symbols before it);
        minus infinity for `<s>`, which is never predicted.
      log_backoffs: per order but the highest, `[n]` float64, logarithm of the back-off
        weight of the n-gram as a history; 0 for an n-gram without extensions.
      end_of_text: e, or None.
    """

    vocab_size: int
    keys: trie.Keys
    log_probs: tuple[np.ndarray, ...]
    log_backoffs: tuple[np.ndarray, ...]
    end_of_text: int | None = None

    kind: ClassVar = storage.kind(
        *("an n-gram model", "ngram_model.json", "build the model again"),
        # The files that other programs read, see `ngrams.build_model`.
        *("model.arpa.gz", "model.fst", "symbols.txt"),
    )
    values: ClassVar = {
        # Rounding may leave a probability a little above 1; that of `<s>` is 0.
        "log_probs": dataclasses.replace(FLOATS, high=0.01, finite=False),
        "log_backoffs": FLOATS,
    }

    def __post_init__(self) -> None:
        if self.end_of_text is None:
            return
        if not 0 <= self.end_of_text < self.vocab_size:
            raise UserError(
                f"end_of_text is {self.end_of_text}, which is outside the vocabulary "
                f"0 ... {self.vocab_size - 1}."
            )
        index = np.searchsorted(self.keys[0], self.end_of_text)
        if index < self.keys[0].size and self.keys[0][index] == self.end_of_text:
            raise UserError(
                f"end_of_text is {self.end_of_text}, but the model has a unigram of "
                "this token in addition to </s>."
            )

    @property
    def order(self) -> int:
        """N, the length of the longest n-grams."""
        return len(self.keys)

    def is_history(self, order: int) -> np.ndarray:
        """Whether each n-gram of an order has a back-off weight, `[n]` bool.

        Those with extensions have one, `<s>` too, and in models of other programs
        perhaps further ones.
        """
        if order == self.order:
            return np.zeros(self.keys[-1].size, bool)
        children = np.diff(trie.child_offsets(self.keys, order, self.width))
        histories = (children > 0) | (self.log_backoffs[order - 1] != 0)
        return histories | (self.keys[0] == self.bos) if order == 1 else histories

    def with_vocab_size(self, vocab_size: int) -> "NGramModel":
        """Returns the same n-grams for another number V of tokens."""
        trie.check_vocab_size(vocab_size, "the n-gram model")
        width, keys = trie.symbol_width(vocab_size), []
        for order in self.keys:
            parents, symbols = np.divmod(order, self.width)
            is_token = symbols < self.vocab_size
            if (is_token & (symbols >= vocab_size)).any():
                raise UserError(
                    f"the n-gram model has tokens beyond the {vocab_size} of the "
                    "language model: it was built with another tokenizer."
                )
            # The boundaries are the two symbols after the tokens: the order is kept.
            symbols = np.where(
                is_token, symbols, symbols - self.vocab_size + vocab_size
            )
            keys.append(parents * width + symbols)
        return dataclasses.replace(self, vocab_size=vocab_size, keys=tuple(keys))

    def log_prob(self, context: Sequence[int], token: int) -> float:
        """Returns log P(token | context); minus infinity for an unseen token.

        Args:
          context: the preceding tokens, oldest first, any number; a text begins with
            `bos` or `end_of_text`.
          token: a token, or `eos`.
        """
        contexts = np.asarray(context[max(0, len(context) - self.order + 1) :], int)
        return float(self.log_probs_of(contexts[None], np.array([token]))[0])

    def log_probs_of(self, contexts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns log P(token | context) for many pairs at once.

        Args:
          contexts: `[Q, C]` int, oldest token first, padded with -1 on the left. Only
            the last N-1 tokens matter.
          tokens: `[Q]` int.

        Returns:
          `[Q]` float64.
        """
        contexts = contexts[:, max(0, contexts.shape[1] - self.order + 1) :]
        tokens = np.asarray(tokens)
        if self.end_of_text is not None:
            contexts = np.where(contexts == self.end_of_text, self.bos, contexts)
            tokens = np.where(tokens == self.end_of_text, self.eos, tokens)
        symbols = np.concatenate([contexts, tokens[:, None]], axis=1)
        return self.stream_log_probs(symbols)[:, -1]

    def stream_log_probs(
        self, symbols: np.ndarray, offsets: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """Returns log P(symbol | all symbols before it) along the last axis.

        The n-grams that end at a position are extensions of those that end at the
        previous position, so N binary searches per position suffice. No n-gram contains
        `</s>` before its end or `<s>` after its beginning, so the sequences of a stream
        are independent.

        Args:
          symbols: `[..., T]` int, symbols; -1 for padding on the left.
          offsets: the `child_offsets` of orders 0 ... N-1, which make long streams
            several times faster; None to compute without them.

        Returns:
          `[..., T]` float64.
        """
        if symbols.size and not -1 <= symbols.min() <= symbols.max() < self.width:
            raise ValueError(
                f"symbols must be from -1 to {self.width - 1}, but are from "
                f"{symbols.min()} to {symbols.max()}"
            )
        # The n-gram of `size` symbols that ends before each position; -1 for none.
        histories = np.zeros(symbols.shape, np.int64)
        scores = np.full(symbols.shape, -np.inf)
        for size in range(self.order):
            index = trie.find(
                self.keys[size],
                histories,
                symbols,
                self.width,
                offsets[size] if offsets else None,
            )
            if size:
                weights = self.log_backoffs[size - 1][histories]
                scores = scores + np.where(histories >= 0, weights, 0.0)
            scores = np.where(index >= 0, self.log_probs[size][index], scores)
            histories = np.full(symbols.shape, -1, np.int64)
            histories[..., 1:] = index[..., :-1]
        return scores

    def context_sums(self) -> list[np.ndarray]:
        """Returns the sum of P over all events after every history, 1 up to rounding.

        For the lengths 0 ... N-1 of the history, `[n]` float64 each.
        """
        return context_sums(
            self.keys,
            [np.exp(log_prob) for log_prob in self.log_probs],
            [np.exp(weight) for weight in self.log_backoffs],
            self.width,
        )

    def validate(self, tolerance: float = 1e-6) -> None:
        """Checks that the model sums to one in every context.

        Models of other programs may not, if they reserve mass for unknown words or were
        written with few digits.
        """
        for length, sums in enumerate(self.context_sums()):
            worst = int(np.argmax(np.abs(sums - 1)))
            if not abs(sums[worst] - 1) <= tolerance:
                history = self.ngrams(length)[worst].tolist() if length else []
                raise UserError(
                    "the model is not normalised: the probabilities after the history "
                    f"{history} sum to {sums[worst]:.6f}."
                )

    def with_unseen_tokens(self, log_prob: float = -1000.0) -> "NGramModel":
        """Returns a model in which every token of the vocabulary has a unigram.

        Args:
          log_prob: natural logarithm of the probability of an unseen token, at most
            `HIGHEST_UNSEEN`, so that the model still sums to one. The paper's in-domain
            models use -1000.
        """
        tokens = np.arange(self.vocab_size)
        if self.end_of_text is not None:
            tokens = np.delete(tokens, self.end_of_text)
        return self.with_unigrams(tokens, log_prob)

    def interpolated(self, unigrams: "NGramModel", share: float) -> "NGramModel":
        """Returns this model, interpolated with the unigrams of another (appendix D).

        The probability of every n-gram becomes (1 - share) P(w | h) + share P'(w) with
        the other model's unigrams P', and back-off weights follow from these.
        """
        if unigrams.vocab_size != self.vocab_size:
            raise UserError(
                f"the unigrams are of {unigrams.vocab_size} tokens, the n-grams of "
                f"{self.vocab_size}: give models of one vocabulary."
            )
        # `</s>` has the same symbol in both models, but perhaps another token.
        excluded = [unigrams.bos]
        if self.end_of_text is not None:
            excluded.append(self.end_of_text)
        symbols = unigrams.keys[0][~np.isin(unigrams.keys[0], excluded)]
        mixed = self.with_unigrams(symbols, -np.inf)
        # Zero for symbols that the other model has not seen, and for `<s>`.
        other = np.zeros(mixed.width)
        at = np.searchsorted(unigrams.keys[0], symbols)
        other[symbols] = np.exp(unigrams.log_probs[0][at])
        other /= other.sum()
        probs = [
            (1 - share) * np.exp(log_probs) + share * other[keys % mixed.width]
            for keys, log_probs in zip(mixed.keys, mixed.log_probs, strict=True)
        ]
        with np.errstate(divide="ignore"):
            log_probs = tuple(np.log(prob) for prob in probs)
        return dataclasses.replace(
            mixed,
            log_probs=log_probs,
            log_backoffs=log_backoffs(mixed.keys, probs, mixed.width),
        )

    def with_unigrams(self, symbols: np.ndarray, log_prob: float) -> "NGramModel":
        """Returns a model in which all of these symbols have a unigram."""
        unigrams = np.union1d(self.keys[0], symbols)
        index = np.searchsorted(unigrams, self.keys[0])
        log_probs = np.full(unigrams.size, float(log_prob))
        log_probs[index] = self.log_probs[0]
        keys, backoffs = [unigrams, *self.keys[1:]], list(self.log_backoffs)
        if self.order > 1:
            # Only the keys of bigrams contain indices of unigrams.
            parents, symbols = np.divmod(self.keys[1], self.width)
            keys[1] = index[parents] * self.width + symbols
            backoffs[0] = np.zeros(unigrams.size)
            backoffs[0][index] = self.log_backoffs[0]
        return dataclasses.replace(
            self,
            keys=tuple(keys),
            log_probs=(log_probs, *self.log_probs[1:]),
            log_backoffs=tuple(backoffs),
        )

    def with_finite_scores(self) -> "NGramModel":
        """Returns a model whose log-probabilities and back-off weights are finite.

        -1000 is the log-probability of tokens without a unigram and of the end-of-text
        token if the model has no `</s>`, and replaces log-probabilities and back-off
        weights of minus infinity, so that every path of a lattice has a score.
        """
        symbols = np.arange(self.vocab_size)
        if self.end_of_text is not None:
            symbols[self.end_of_text] = self.eos
        model = self.with_unigrams(symbols, _UNSEEN)
        return dataclasses.replace(
            model,
            log_probs=tuple(map(_finite, model.log_probs)),
            log_backoffs=tuple(map(_finite, model.log_backoffs)),
        )


def _finite(values: np.ndarray) -> np.ndarray:
    infinite = np.isneginf(values)
    return np.where(infinite, _UNSEEN, values) if infinite.any() else values
