"""Sequences to count, and comparison of models, counts and folders."""

import filecmp
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bpd_jax.ngrams.counting.counts import NGramCounts
from bpd_jax.ngrams.counting.sources import TokenSource
from bpd_jax.ngrams.counting.windows import TokenBatch, join
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.storage import NGramArrays


class Sequences(TokenSource):
    """Sequences in batches of ten; an iteration fails after `fail_after` of them."""

    def __init__(
        self,
        sequences: Sequence[np.ndarray],
        fail_after: int | None = None,
        *,
        vocab_size: int,
    ) -> None:
        super().__init__("text", vocab_size, None)
        self.rows = sequences
        self.fail_after = fail_after
        self.read_from: list[int] = []

    def batches(self, skip: int = 0) -> Iterator[TokenBatch]:
        self.read_from.append(skip)
        for begin in range(skip, len(self.rows), 10):
            if self.fail_after is not None and begin >= self.fail_after:
                raise KeyboardInterrupt
            yield join(self.rows[begin : begin + 10])

    def fingerprint(self) -> str:
        return f"{len(self.rows)} sequences"


def sequences_of(batches: Iterable[TokenBatch]) -> list[list[int]]:
    return [
        part.tolist()
        for tokens, lengths in batches
        for part in np.split(tokens, np.cumsum(lengths[:-1]))
    ]


def as_text(counts: NGramCounts) -> str:
    """Counts in the format of `ngram-count -write`, with ids, `<s>` and `</s>`."""
    names = [*map(str, range(counts.vocab_size)), "</s>", "<s>"]
    return "".join(
        f"{' '.join(names[symbol] for symbol in row)}\t{number}\n"
        for order, numbers in enumerate(counts.counts, start=1)
        for row, number in zip(counts.ngrams(order), numbers, strict=True)
    )


def assert_same(
    actual: NGramArrays, expected: NGramArrays, *, rtol: float = 0, atol: float = 0
) -> None:
    assert actual.vocab_size == expected.vocab_size
    assert actual.sizes == expected.sizes
    for name in ("keys", *actual.values):
        for array, expected_array in zip(
            getattr(actual, name), getattr(expected, name), strict=True
        ):
            np.testing.assert_allclose(array, expected_array, rtol=rtol, atol=atol)


def same_folders(first: pathlib.Path, second: pathlib.Path) -> bool:
    names = sorted(path.name for path in first.iterdir())
    equal, _, _ = filecmp.cmpfiles(first, second, names, shallow=False)
    return sorted(equal) == names == sorted(path.name for path in second.iterdir())


def tables_of(model: NGramModel) -> tuple[dict, dict]:
    """Log-probabilities and back-off weights by n-gram."""
    scores, weights = {}, {}
    for order in range(1, model.order + 1):
        grams = list(map(tuple, model.ngrams(order).tolist()))
        scores |= zip(grams, model.log_probs[order - 1], strict=True)
        if order < model.order:
            weights |= zip(grams, model.log_backoffs[order - 1], strict=True)
    return scores, weights


def ngram_set(arrays: NGramArrays) -> set[tuple[int, ...]]:
    return {
        tuple(row)
        for order in range(1, len(arrays.keys) + 1)
        for row in arrays.ngrams(order).tolist()
    }


# Back-off weights without extensions (`2`, `0 1`), an impossible bigram, no </s>.
ODD_ARPA = r"""\\data\\
ngram 1=4
ngram 2=4
ngram 3=1

\\1-grams:
-99 <s> -0.3
-0.5 0 -0.2
-0.4 1 -0.1
-0.9 2 -1.5

\\2-grams:
-0.2 <s> 0 0.4
-0.3 0 1 0.6
-inf 1 0
-0.7 1 1

\\3-grams:
-0.1 <s> 0 1

\\end\\
""".replace("\\\\", "\\")
