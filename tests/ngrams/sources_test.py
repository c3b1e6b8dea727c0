"""Tests of bpd_jax.ngrams.sources."""

import gzip
import pathlib

import pytest

from bpd_jax.errors import UserError
from bpd_jax.ngrams.sources import read_token_file


def test_lines_become_sequences(tmp_path: pathlib.Path) -> None:
    text = b"1 2  3\r\n\n\t4\n 50256 0"
    (tmp_path / "ids.txt").write_bytes(text)
    # Told by its content, not by its name.
    (tmp_path / "packed.txt").write_bytes(gzip.compress(text))
    for name in ("ids.txt", "packed.txt"):
        sequences = list(read_token_file(tmp_path / name))
        assert [line.tolist() for line in sequences] == [[1, 2, 3], [4], [50256, 0]]
        assert all(line.dtype == "int32" for line in sequences)


@pytest.mark.parametrize(
    "line, message",
    [
        (b"1 x2", "line 2: 'x2' is no token id"),
        (b"1 -2", "line 2: '-2' is no token id"),
        (b"1.5", "line 2: '1.5' is no token id"),
        (b"1_0", "line 2: '1_0' is no token id"),
        (b"1 \xff", r"line 2: '\\\\xff' is no token id"),
        ("٣".encode(), "line 2: '٣' is no token id"),
        (b"99999999999", "line 2: 99999999999 is no token id"),
    ],
)
def test_anything_else_is_refused(
    tmp_path: pathlib.Path, line: bytes, message: str
) -> None:
    path = tmp_path / "ids.txt"
    path.write_bytes(b"1 2\n" + line + b"\n3\n")
    with pytest.raises(UserError, match=message) as caught:
        list(read_token_file(path))
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        list(read_token_file(tmp_path / "missing.txt"))
    path = tmp_path / "ids.txt.gz"
    path.write_bytes(gzip.compress(b"1 2 3\n" * 1000)[:-12])
    with pytest.raises(UserError, match="cut short"):
        list(read_token_file(path))
