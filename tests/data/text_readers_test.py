import gzip

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data import text_readers


def test_text_is_read_unchanged_without_a_byte_order_mark(tmp_path):
    text = "a\r\nb\rc\n\0é😀\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert text_readers.read_text(tmp_path / "a.txt") == text
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo")
    assert text_readers.read_text(tmp_path / "a.txt") == "one\ntwo"
    assert list(text_readers.read_lines(tmp_path / "a.txt")) == [(1, "one"), (2, "two")]


def test_only_newlines_end_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\u2028more\x0c\r\ntwo".encode())
    lines = list(text_readers.read_lines(tmp_path / "a.txt"))
    assert lines == [(1, "one\u2028more\x0c"), (2, "two")]


@pytest.mark.parametrize(
    "data, offset",
    [(b"ab\xff", 2), (b"\xef\xbb\xbfab\xff", 5), (b"one\ntw\xffo", 6)],
)
def test_error_names_the_byte_that_is_not_utf8(tmp_path, data, offset):
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    for read in (
        text_readers.read_text,
        lambda path: list(text_readers.read_lines(path)),
    ):
        with pytest.raises(UserError, match=rf"a\.txt is not UTF-8.*offset {offset}\)"):
            read(path)


def test_json_lines_plain_and_gzip(tmp_path):
    data = b'{"text": "a\\nb", "n": 1}\n\n{"text": "\\u00e9"}\n'
    (tmp_path / "a.jsonl").write_bytes(data)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(data)
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert text_readers.is_json_lines(tmp_path / name)
        texts = list(text_readers.read_json_fields(tmp_path / name, ["text"]))
        assert texts == [(1, {"text": ["a\nb"]}), (3, {"text": ["é"]})]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{'text': 1}", "line 2 is not JSON"),
        ('{"body": "a"}', "line 2 has no text in the field 'text'"),
        ('{"text": 1}', "line 2 has no text in the field 'text'"),
        ('["text"]', "line 2 has no text in the field 'text'"),
        ('{"text": null}', "line 2 has no text in the field 'text'"),
        ("[" * 100_000, "line 2 is not JSON: maximum recursion"),
        ('{"text": ' + "1" * 5000 + "}", "line 2 is not JSON: Exceeds"),
        ('{"text": "a\\ud800"}', r"line 2.*lone surrogate"),
    ],
)
def test_error_names_the_line_of_an_invalid_record(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(UserError, match=message) as caught:
        list(text_readers.read_json_fields(path, ["text"]))
    assert str(path) in str(caught.value)


def test_missing_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none\.txt"):
        text_readers.read_text(tmp_path / "none.txt")
    with pytest.raises(UserError, match=r"cannot read .*none\.txt"):
        list(text_readers.read_lines(tmp_path / "none.txt"))
    intact = gzip.compress(b'{"text": "a"}\n' * 100)
    for name, data in {"cut": intact[:-9], "plain": b"not packed"}.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(UserError, match=rf"cannot read .*{name}"):
            list(text_readers.read_json_fields(path, ["text"]))
