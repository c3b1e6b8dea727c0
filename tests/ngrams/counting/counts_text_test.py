"""Tests of bpd_jax.ngrams.counting.counts_text."""

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting.counts import count_ngrams, with_min_counts
from bpd_jax.ngrams.counting.counts_text import read_counts
from tests.ngrams.helpers import as_text, assert_same


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=20),
    st.integers(1, 4),
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_written_counts_are_read(tmp_path_factory, sequences, order, minimums, random):
    path = tmp_path_factory.mktemp("counts") / "counts.txt.gz"
    all_counts = count_ngrams(sequences, order=order, vocab_size=4)
    for counts in (all_counts, with_min_counts(all_counts, [1, *minimums])):
        lines = as_text(counts).splitlines(keepends=True)
        random.shuffle(lines)
        path.write_bytes(gzip.compress("".join(lines).encode()))
        assert_same(read_counts(path, vocab_size=4), counts, rtol=1e-6)


def test_equivalent_forms_of_counts_are_read(tmp_path):
    path = tmp_path / "counts.txt"
    path.write_bytes(b"0 \t2\r\n<s> 1\n\n</s>\t1.0\n<s>  0\t1e0\n0 </s>\t1\n0 0 1")
    counts = read_counts(path, end_of_text=1)
    assert counts.vocab_size == 2
    assert counts.end_of_text == 1
    assert_same(counts, count_ngrams([[0, 0]], order=2, vocab_size=2))


SMALL = (
    "0\t4\n1\t2\n</s>\t2\n<s>\t2\n<s> 0\t2\n0 1\t2\n0 0\t2\n1 </s>\t2\n0 1 </s>\t2\n"
)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("0 1\t2", "0 1\t-2", "line 6: the count '-2' is not a positive"),
        ("0 1\t2", "0 1\t0", "line 6: the count '0' is not a positive"),
        ("0 1\t2", "0 1\t1.5", "line 6: the count '1.5' is not a positive"),
        ("0 1\t2", "0 1\tnan", "line 6: the count 'nan' is not a positive"),
        ("0 1\t2", "0 1\ttwo", "line 6: the count 'two' is not a number"),
        ("0 1\t2", "2", "line 6: expected an n-gram, a tab and its count"),
        ("0 1\t2", "\x1c", "line 6: expected an n-gram, a tab and its count"),
        ("0 1\t2", "0 x\t2", "line 6: 'x' is not a token"),
        ("0 1\t2", "0 <s\t2", "line 6: '<s' is not a token"),
        ("0 1\t2", f"0 {2**31}\t2", "line 6: '2147483648' is not a token"),
        ("0 1\t2", "0 5\t2", "line 6: 5 is not a token"),
        ("<s> 0\t2", "<s> 0\t3", "line 5: its count is higher than that of its first"),
        ("0 1\t2", "0 1\t3", "line 6: its count is higher than that of its last 1"),
        ("0 0\t2", "0 0\t3", "line 1: the counts of its extensions add up to more"),
        ("0 0\t2", "0 1\t2", "line 7: this 2-gram is listed twice"),
        ("1\t2\n", "0\t4\n", "line 2: this 1-gram is listed twice"),
        ("1 </s>\t2", "1 0\t2", "line 9: its last 2 symbols have no count"),
        ("0 1\t2", "1 1\t2", "line 9: its first 2 symbols have no count"),
        ("0 1\t2", "0 <s>\t2", "line 6: <s> must be the first and </s> the last"),
        ("0 0\t2", "</s> 0\t2", "line 7: <s> must be the first and </s> the last"),
        (SMALL, "0 1\t2\n", "more than 1 symbols, but no 1-grams"),
        (SMALL, "\n", "holds no counts"),
        ("0 0\t2", "0 \xff\t2", "line 7: this is not UTF-8"),
        ("0 1\t2", f"0 1\t{'9' * 5000}", r"line 6: the count '9+ … 9+' is not a"),
        (
            "0 1\t2",
            f"0 1\t{'x' * 5000}",
            r"line 6: the count 'x+ … x+' is not a number",
        ),
        ("0 1\t2", f"0 {'9' * 5000}\t2", r"line 6: '9+ … 9+' is not a token"),
        ("1\t2", "1\t2\n2147483647\t1", "line 3: 2147483647 is not a token"),
    ],
)
def test_inconsistent_counts_are_refused(tmp_path, old, new, message):
    path = tmp_path / "counts.txt"
    path.write_text(SMALL)
    read_counts(path, vocab_size=2)
    assert old in SMALL
    path.write_bytes(SMALL.replace(old, new, 1).encode("latin-1"))
    with pytest.raises(UserError, match=message) as caught:
        read_counts(path, vocab_size=2)
    assert "counts.txt" in str(caught.value)


def test_counts_of_longer_ngrams_that_exceed_their_suffix_are_refused(tmp_path):
    path = tmp_path / "counts.txt"
    lines = ["<s> 2", "</s> 2", "0 5", "1 5", "2 9", "0 2 5", "1 2 4", "2 </s> 2"]
    path.write_text("\n".join(lines))
    assert read_counts(path).counts[0].tolist() == [5, 5, 9, 2, 2]
    # `<s>` is a preceding symbol like any token.
    for line in ("1 2 5", "<s> 2 1"):
        path.write_text("\n".join([*lines[:6], line, *lines[6 + (line[0] == "1") :]]))
        with pytest.raises(UserError, match=r"line 5: the counts of longer n-grams"):
            read_counts(path)


def test_counts_may_have_leading_zeros(tmp_path):
    path = tmp_path / "counts.txt"
    zeros = "0" * 5000
    path.write_text(f"{zeros} {zeros}12\n</s> {zeros}2.0\n<s> 2\n")
    assert read_counts(path).counts[0].tolist() == [12, 2, 2]


def test_vocabulary_that_is_too_large_is_refused(tmp_path):
    path = tmp_path / "counts.txt"
    path.write_text(f"{2**31 - 1} 1\n</s> 1\n<s> 1\n")
    with pytest.raises(UserError, match=r"counts\.txt: a vocabulary of 2,147,483,648"):
        read_counts(path)
