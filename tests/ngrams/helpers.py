"""Comparison of models, counts and folders."""

import filecmp
import pathlib

import numpy as np

from bpd_jax.ngrams.storage import NGramArrays


def assert_same(
    actual: NGramArrays, expected: NGramArrays, *, rtol: float = 0, atol: float = 0
) -> None:
    """Checks that the n-grams are equal, and their values up to a tolerance."""
    assert actual.vocab_size == expected.vocab_size
    assert actual.sizes == expected.sizes
    for name in ("keys", *actual.values):
        for array, expected_array in zip(
            getattr(actual, name), getattr(expected, name), strict=True
        ):
            np.testing.assert_allclose(array, expected_array, rtol=rtol, atol=atol)


def same_folders(first: pathlib.Path, second: pathlib.Path) -> bool:
    """Whether two folders have the same files, byte for byte."""
    names = sorted(path.name for path in first.iterdir())
    equal, _, _ = filecmp.cmpfiles(first, second, names, shallow=False)
    return sorted(equal) == names == sorted(path.name for path in second.iterdir())


def ngram_set(arrays: NGramArrays) -> set[tuple[int, ...]]:
    """Returns the symbols of all n-grams."""
    return {
        tuple(row)
        for order in range(1, len(arrays.keys) + 1)
        for row in arrays.ngrams(order).tolist()
    }
