import gzip

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.counting import token_files
from bpd_jax.ngrams.counting.token_files import (
    highest_id,
    read_batches,
)
from tests.ngrams.helpers import sequences_of


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_lines_become_sequences(tmp_path, monkeypatch, block):
    monkeypatch.setattr(token_files, "_BLOCK", block)
    text = b"1 2  3\r\n\n\t4\n 50256 %s7 02147483647" % (b"0" * 50)
    (tmp_path / "ids.txt").write_bytes(text)
    # The format is recognised by the content.
    (tmp_path / "packed.txt").write_bytes(gzip.compress(text))
    for path in (tmp_path / "ids.txt", tmp_path / "packed.txt"):
        assert sequences_of(read_batches(path, None)) == [
            [1, 2, 3],
            [4],
            [50256, 7, 2**31 - 1],
        ]
        assert all(batch.tokens.dtype == "int32" for batch in read_batches(path, None))
        assert highest_id(path) == 2**31 - 1


@pytest.mark.parametrize(
    "line, message",
    [
        (b"1_0", "line 2: '1_0' is not a token id"),
        ("٣".encode(), "line 2: '٣' is not a token id"),
        (b"7 99999999999", "line 2: '99999999999' is not a token id"),
        (b"7 " + b"9" * 5000, r"line 2: '9+ … 9+' is not a token id"),
    ],
)
def test_other_texts_are_refused(tmp_path, line, message):
    path = tmp_path / "ids.txt"
    path.write_bytes(b"1 2\n" + line + b"\n3\n")
    with pytest.raises(UserError, match=message) as caught:
        list(read_batches(path, None))
    assert str(path) in str(caught.value)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        list(read_batches(tmp_path / "missing.txt", None))
    path = tmp_path / "ids.txt.gz"
    path.write_bytes(gzip.compress(b"1 2 3\n" * 1000)[:-12])
    with pytest.raises(UserError, match="truncated"):
        list(read_batches(path, None))


@pytest.mark.parametrize("block, dtype", [(1, "u2"), (3, "i8"), (100, ">i4")])
def test_end_of_text_separates_the_documents_of_an_array(
    tmp_path, monkeypatch, block, dtype
):
    monkeypatch.setattr(token_files, "_ARRAY_BLOCK", block)
    path = tmp_path / "ids"
    with path.open("wb") as file:
        np.save(file, np.array([9, 0, 1, 9, 9, 9, 2, 3, 4, 5, 9, 6], dtype))
    documents = sequences_of(read_batches(path, 9))
    assert documents == [[0, 1], [2, 3, 4, 5], [6]]
    (batch,) = read_batches(path, None)
    assert batch.tokens.dtype == "int32"
    assert batch.lengths.tolist() == [12]
    assert highest_id(path) == 9


@pytest.mark.parametrize(
    "array, message",
    [
        (np.zeros((2, 3), int), r"int64 of shape \[2, 3\]"),
        (np.array([1, -2, 3]), "index 1: -2 is not a token id"),
        (np.array([1, 2, 2**31]), "index 2: 2147483648 is not a token id"),
    ],
)
def test_arrays_that_are_not_ids_are_refused(tmp_path, array, message):
    path = tmp_path / "ids.npy"
    np.save(path, array)
    with pytest.raises(UserError, match=message) as caught:
        list(read_batches(path, 0))
    assert str(path) in str(caught.value)


def test_truncated_arrays_and_damaged_headers_are_refused(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(100))
    data = path.read_bytes()
    for damaged in (data[:-9], data.replace(b"{", b"(", 1)):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"ids\.npy is truncated or damaged"):
            highest_id(path)
