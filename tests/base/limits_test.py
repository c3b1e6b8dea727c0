import gzip
import sys

import pytest

from bpd_jax.base import limits
from bpd_jax.base.errors import UserError
from bpd_jax.data import text_readers
from bpd_jax.data.prompts import read_prompts_file


def test_integers_beyond_float64_are_refused():
    largest = int(sys.float_info.max)
    assert limits.parse_json(f"[{10**307}, -{2**70}]") == [10**307, -(2**70)]
    for number in (10 * largest, -10 * largest):
        with pytest.raises(ValueError, match="beyond the range"):
            limits.parse_json(f'{{"a": {number}}}')


def test_length_of_a_line_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MOST_LINE", 10)
    path = tmp_path / "lines.gz"
    with gzip.open(path, "wb") as stream:
        stream.write(b"123456789\n" * 3 + b"1234567890\n")
    lines = text_readers.read_lines(path)
    assert [next(lines)[0] for _ in range(3)] == [1, 2, 3]
    with pytest.raises(UserError, match="line 4, has more than 10 bytes"):
        next(lines)


def test_total_size_of_kept_lines_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MOST_KEPT", 10 * (limits.LINE_COST + 2))
    for name, line in {"a.txt.gz": b"a\n", "a.jsonl.gz": b'{"prompt": "a"}\n'}.items():
        path = tmp_path / name
        path.write_bytes(gzip.compress(line * 11))
        with pytest.raises(UserError, match="too large to be kept in memory"):
            read_prompts_file(path)
        # A file that is read line by line may have any number of lines.
        assert len(list(text_readers.read_lines(path))) == 11
    (tmp_path / "few.txt").write_bytes(b"a\n" * 10)
    assert read_prompts_file(tmp_path / "few.txt") == ["a"] * 10
