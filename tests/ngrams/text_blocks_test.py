"""Tests of bpd_jax.ngrams.text_blocks."""

import gzip

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import text_blocks
from bpd_jax.ngrams.text_blocks import TextBlocks, line_blocks

TEXT = b"one\n\nthree is a long line\nfour"


@pytest.mark.parametrize("block", [1, 2, 7, 1000])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_blocks_contain_complete_lines(tmp_path, monkeypatch, block, end):
    monkeypatch.setattr(text_blocks, "_BLOCK", block)
    path = tmp_path / "text"
    for data in (TEXT + end, gzip.compress(TEXT + end)):
        path.write_bytes(data)
        lines = TextBlocks(path)
        read_lines = []
        while (line := lines.next_line()) is not None:
            read_lines.append(line)
        assert read_lines == TEXT.split(b"\n")
        assert lines.number == 4


def test_long_lines_are_not_copied_for_every_block(tmp_path, monkeypatch):
    monkeypatch.setattr(text_blocks, "_BLOCK", 64)
    path = tmp_path / "text"
    path.write_bytes(b"x" * 4_000_000)
    line = TextBlocks(path).next_line()
    assert line is not None
    assert len(line) == 4_000_000


def test_small_gzip_file_of_many_equal_lines_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_blocks, "_FREE_LINES", 0)
    path = tmp_path / "text"
    path.write_bytes(gzip.compress(b"1 2\t3\n" * 100_000))
    with pytest.raises(UserError, match="repeated lines"):
        list(line_blocks(path, None, distinct=True))
    # Lines of token ids may be equal.
    (block,) = line_blocks(path, None)
    assert block.count(b"\n") == 100_000
    # The densest distinct lines differ in one character.
    text = b"".join(b"%d %d\t1\n" % (i, j) for i in range(300) for j in range(300))
    path.write_bytes(gzip.compress(text, 9))
    assert b"".join(line_blocks(path, None, distinct=True)) == text
    path.write_bytes(text * 9)
    assert len(b"".join(line_blocks(path, None, distinct=True))) == 9 * len(text)
