"""A back-off n-gram model as sorted arrays, and its probabilities."""

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.errors import UserError
from bpd_jax.ngrams import parallel, storage, trie
from bpd_jax.ngrams.backoff import context_sums
from bpd_jax.ngrams.counting import windows

# Natural logarithm of the highest probability that an unseen token may get.
HIGHEST_UNSEEN = -50.0

# Number of tokens scored at once.
_PART = 1 << 20


class Evaluation(NamedTuple):
    """The evaluation of a model on a text.

    Attributes:
      events: predicted symbols, one `</s>` per sequence included.
      unknown: number of predicted symbols without a unigram.
      log_prob: natural logarithm of the probability of all other symbols.
    """

    events: int
    unknown: int
    log_prob: float

    @property
    def perplexity(self) -> float:
        """Perplexity per event with a unigram; NaN if there is none."""
        scored = self.events - self.unknown
        try:
            return math.exp(-self.log_prob / scored) if scored else math.nan
        except OverflowError:
            return math.inf


@dataclasses.dataclass(frozen=True, eq=False)
class NGramModel:
    """A back-off model of orders 1 ... N over a vocabulary of V tokens.

    `bpd_jax.ngrams.trie` describes the layout. All logarithms are natural (ARPA files
    hold those to base 10) and float64, so that a model sums to one in every context
    to about 1e-12, also after pruning.

    A model of documents may identify one token with the sentence boundaries: with
    `end_of_text = e`, predicting e is predicting `</s>`, and e in a context
    stands for `<s>`. In a stream of documents, the e that ends a document thus begins
    the next one. Without it, `</s>` and `<s>` are symbols of
    their own only, `eos` and `bos`, which may be used as a token and in a context.

    Attributes:
      vocab_size: V.
      keys: per order, `[n]` int64.
      log_probs: per order, `[n]` float64, log P(last symbol | the symbols before it);
        minus infinity for `<s>`, which is never predicted.
      log_backoffs: per order but the highest, `[n]` float64, the back-off weight of
        the n-gram as a history; 0 for one without extensions.
      end_of_text: e, or None.
    """

    vocab_size: int
    keys: trie.Keys
    log_probs: tuple[np.ndarray, ...]
    log_backoffs: tuple[np.ndarray, ...]
    end_of_text: int | None = None

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
                f"end_of_text is {self.end_of_text}, but the model has that token as "
                "an ordinary unigram beside </s>."
            )

    @property
    def order(self) -> int:
        """N, the length of the longest n-grams."""
        return len(self.keys)

    @property
    def width(self) -> int:
        """The number of symbols, V + 2."""
        return trie.symbol_width(self.vocab_size)

    @property
    def eos(self) -> int:
        """The symbol of `</s>`."""
        return trie.eos_symbol(self.vocab_size)

    @property
    def bos(self) -> int:
        """The symbol of `<s>`."""
        return trie.bos_symbol(self.vocab_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of n-grams per order, `<s>` among the unigrams, as in ARPA files."""
        return tuple(keys.size for keys in self.keys)

    def ngrams(self, order: int) -> np.ndarray:
        """Returns the symbols of all n-grams of `order`, `[n, order]` int32."""
        return trie.ngrams(self.keys, order, self.width)

    def log_prob(self, context: Sequence[int], token: int) -> float:
        """Returns log P(token | context); minus infinity for a token never seen.

        Args:
          context: the tokens before it, oldest first, of any length; a text begins
            with `bos` or `end_of_text`.
          token: a token, or `eos`.
        """
        contexts = np.asarray(context[max(0, len(context) - self.order + 1) :], int)
        return float(self.log_probs_of(contexts[None], np.array([token]))[0])

    def log_probs_of(self, contexts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns log P(token | context) for many pairs at once.

        Args:
          contexts: `[Q, C]` int, oldest token first; -1 on the left where there is
            none. Tokens further back than N-1 make no difference.
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

    def evaluate(self, sequences: Iterable[Sequence[int] | np.ndarray]) -> Evaluation:
        """Scores sequences, each from `<s>` to `</s>`; takes them as they come.

        Raises:
          UserError: there is none, or a token is outside the vocabulary.
        """
        return evaluate_all([self], sequences)[0]

    def perplexity(self, sequences: Iterable[Sequence[int] | np.ndarray]) -> float:
        """Returns the perplexity per event, `</s>` included; unknown tokens left out.

        Raises:
          UserError: there is no sequence, or a token is outside the vocabulary.
        """
        return self.evaluate(sequences).perplexity

    def stream_log_probs(
        self, symbols: np.ndarray, offsets: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """Returns log P(symbol | all before it) along the last axis, same shape.

        With `offsets`, the `child_offsets` of orders 0 ... N-1, long streams are fast.

        A symbol's n-grams are extensions of the n-grams that end one place before, so
        N binary searches per place suffice. No n-gram holds `</s>` before its end or
        `<s>` after its beginning: sequences in a stream do not see each other.
        """
        if symbols.size and not -1 <= symbols.min() <= symbols.max() < self.width:
            raise ValueError(
                f"symbols must lie in -1 ... {self.width - 1}: found "
                f"{symbols.min()} ... {symbols.max()}"
            )
        # The n-gram of the size at hand that ends before each place, or -1.
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
        """Returns the sum of P over all events in every history, 1 up to rounding.

        Per length 0 ... N-1 of the history, `[n]` float64; see `backoff.context_sums`.
        """
        return context_sums(
            self.keys,
            [np.exp(log_prob) for log_prob in self.log_probs],
            [np.exp(weight) for weight in self.log_backoffs],
            self.width,
        )

    def validate(self, tolerance: float = 1e-6) -> None:
        """Checks that the model sums to one in every context.

        Models of other programs that keep a share for unknown words, or were written
        with few digits, do not.

        Raises:
          UserError: some context is off by more than `tolerance`.
        """
        for length, sums in enumerate(self.context_sums()):
            worst = int(np.argmax(np.abs(sums - 1)))
            if not abs(sums[worst] - 1) <= tolerance:
                history = self.ngrams(length)[worst].tolist() if length else []
                raise UserError(
                    f"the model does not sum to one: after {history} the probabilities "
                    f"add up to {sums[worst]:.6f}."
                )

    def with_unseen_tokens(self, log_prob: float = -1000.0) -> "NGramModel":
        """Returns a model in which every token of the vocabulary has a unigram.

        Args:
          log_prob: natural logarithm of the probability of a token never seen, so low
            that the model still sums to one: `HIGHEST_UNSEEN` or less. The paper's
            in-domain models use -1000.

        Raises:
          UserError: `log_prob` is too high or no finite number.
        """
        if not -math.inf < log_prob <= HIGHEST_UNSEEN:
            raise UserError(
                f"log_prob is {log_prob}: give {HIGHEST_UNSEEN:g} or less, so that the "
                "model still sums to one."
            )
        tokens = np.arange(self.vocab_size)
        if self.end_of_text is not None:
            tokens = np.delete(tokens, self.end_of_text)
        unigrams = np.union1d(self.keys[0], tokens)
        index = np.searchsorted(unigrams, self.keys[0])
        keys, log_probs = [unigrams], [np.full(unigrams.size, float(log_prob))]
        log_probs[0][index] = self.log_probs[0]
        log_backoffs = list(self.log_backoffs)
        if self.order > 1:
            # Only bigrams point at unigrams; the order of everything stays.
            parents, symbols = np.divmod(self.keys[1], self.width)
            keys.append(index[parents] * self.width + symbols)
            log_backoffs[0] = np.zeros(unigrams.size)
            log_backoffs[0][index] = self.log_backoffs[0]
        return dataclasses.replace(
            self,
            keys=(*keys, *self.keys[2:]),
            log_probs=(*log_probs, *self.log_probs[1:]),
            log_backoffs=tuple(log_backoffs),
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the model as a folder of arrays; see `bpd_jax.ngrams.storage`."""
        storage.write_folder(folder, self._arrays(), self._settings())

    def save_into(self, folder: str | os.PathLike[str]) -> None:
        """Like `save`, into a folder that exists and holds other files."""
        storage.write_arrays(folder, self._arrays(), self._settings())

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], *, verify: bool = True
    ) -> "NGramModel":
        """Reads what `save` wrote; the arrays stay on disk until they are touched.

        Args:
          folder: the folder.
          verify: also read everything once to compare checksums; sizes are always
            compared.

        Raises:
          UserError: something is missing, cut short or changed.
        """
        arrays, settings = storage.read_folder(folder, verify=verify)
        orders = range(1, settings["order"] + 1)
        return cls(
            vocab_size=settings["vocab_size"],
            keys=tuple(arrays[f"keys_{order}"] for order in orders),
            log_probs=tuple(arrays[f"log_probs_{order}"] for order in orders),
            log_backoffs=tuple(
                arrays[f"log_backoffs_{order}"] for order in orders[:-1]
            ),
            end_of_text=settings["end_of_text"],
        )

    def _arrays(self) -> dict[str, np.ndarray]:
        groups = {
            "keys": self.keys,
            "log_probs": self.log_probs,
            "log_backoffs": self.log_backoffs,
        }
        return {
            f"{name}_{order}": array
            for name, group in groups.items()
            for order, array in enumerate(group, start=1)
        }

    def _settings(self) -> dict[str, int | None]:
        return {
            "order": self.order,
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
        }


def evaluate_all(
    models: Sequence[NGramModel], sequences: Iterable[Sequence[int] | np.ndarray]
) -> list[Evaluation]:
    """Scores the same sequences with models of one vocabulary, in one pass.

    Raises:
      UserError: there is no sequence, or a token is outside the vocabulary.
    """
    offsets = [
        [trie.child_offsets(model.keys, n, model.width) for n in range(model.order)]
        for model in models
    ]

    def scored(stream: np.ndarray) -> list[Evaluation]:
        results = []
        for model, model_offsets in zip(models, offsets, strict=True):
            scores = model.stream_log_probs(stream, model_offsets)[stream != model.bos]
            finite = np.isfinite(scores)
            unknown = int(np.count_nonzero(~finite))
            results.append(
                Evaluation(scores.size, unknown, float(scores[finite].sum()))
            )
        return results

    streams = _streams(models[0], sequences)
    parts = list(parallel.in_order(scored, streams, parallel.cores()))
    if not parts:
        raise UserError("there is no text to score: the input is empty.")
    return [
        Evaluation(*map(sum, zip(*results, strict=True)))
        for results in zip(*parts, strict=True)
    ]


def _streams(
    model: NGramModel, sequences: Iterable[Sequence[int] | np.ndarray]
) -> Iterator[np.ndarray]:
    """Yields the symbols of about `_PART` tokens at a time, boundaries included."""
    first, size = 1, 0
    waiting: list[Sequence[int] | np.ndarray] = []

    def stream() -> np.ndarray:
        return windows.add_boundaries(
            windows.join(waiting),
            vocab_size=model.vocab_size,
            end_of_text=model.end_of_text,
            first=first,
        )

    for sequence in sequences:
        waiting.append(sequence)
        size += len(sequence)
        if size >= _PART:
            yield stream()
            first, size = first + len(waiting), 0
            waiting.clear()
    if waiting:
        yield stream()
