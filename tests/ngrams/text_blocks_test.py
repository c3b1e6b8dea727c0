"""Tests of bpd_jax.ngrams.text_blocks."""

import gzip

import pytest

from bpd_jax.ngrams import text_blocks
from bpd_jax.ngrams.text_blocks import TextBlocks

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
