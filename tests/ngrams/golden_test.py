"""Agreement with OpenGrm NGram 1.3.6 on one text (files in ../shared/data)."""

import gzip
import pathlib

import numpy as np
import pytest

from bpd_jax.ngrams.counting.counts import count_ngrams, with_min_counts
from bpd_jax.ngrams.formats.arpa_reader import read_arpa
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.prune import prune
from tests.ngrams.helpers import as_text, assert_same, ngram_set

FOLDER = pathlib.Path(__file__).parents[3] / "shared" / "data" / "ngram_golden"
VOCAB_SIZE = 50_257
# In units of log10, as in the files. OpenGrm computes with float32 weights.
TOLERANCE = 2e-5

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="no reference files in ../shared/data"
)


@pytest.fixture(scope="module")
def counts():
    with gzip.open(FOLDER / "tokens.txt.gz", "rt") as lines:
        sequences = [np.array(line.split(), np.int32) for line in lines]
    return count_ngrams(sequences, order=4, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def katz(counts):
    return estimate_katz(counts)


def reference(name):
    return read_arpa(FOLDER / name, vocab_size=VOCAB_SIZE)


def assert_agree(model, expected):
    assert_same(model, expected, atol=TOLERANCE * np.log(10))


def test_counts_equal_opengrms(counts):
    with gzip.open(FOLDER / "counts4.txt.gz", "rt") as lines:
        assert sorted(as_text(counts).splitlines()) == sorted(lines.read().splitlines())


def test_katz_model_equals_opengrms(katz):
    assert_agree(katz, reference("katz4.arpa.gz"))


def test_katz_model_after_min_counts_equals_opengrms(counts):
    model = estimate_katz(with_min_counts(counts, [1, 1, 2, 4]))
    assert_agree(model, reference("katz4_min_counts_1_1_2_4.arpa.gz"))


def test_pruned_model_equals_opengrms(katz):
    # OpenGrm's target of 10,000 does not count `<s>`.
    expected = reference("katz4_pruned_10000.arpa.gz")
    assert_agree(prune(katz, 10_001), expected)
    pruned = prune(reference("katz4.arpa.gz"), 10_001)
    common = ngram_set(pruned) & ngram_set(expected)
    assert len(common) - expected.sizes[0] >= 0.99 * sum(expected.sizes[1:])
