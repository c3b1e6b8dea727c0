import gzip

import numpy as np
import pytest

from bpd_jax.data.corpora import split_documents
from bpd_jax.data.prompts import held_out_prompts, read_prompts_file
from bpd_jax.data.tokenizer import task_tokenizer
from bpd_jax.errors import UserError


def test_prompts_are_consecutive_windows_of_validation_documents(text_task):
    tokenizer = task_tokenizer(text_task)
    streams = {
        document.id: [tokenizer.end_of_text, *tokenizer.encode(document.text)]
        for document in split_documents(text_task, "validation")
    }
    windows = {name: len(stream) // 8 for name, stream in streams.items()}
    total = sum(windows.values())
    prompts = held_out_prompts(text_task, total, 8)
    seen: dict[str, int] = {}
    turns = []
    for name, tokens in prompts:
        turn = seen.get(name, 0)
        assert tokens.dtype == np.int32
        assert tokens.tolist() == streams[name][turn * 8 : turn * 8 + 8]
        assert (tokens[0] == tokenizer.end_of_text) == (turn == 0)
        seen[name] = turn + 1
        turns.append(turn)
    assert seen == windows
    assert turns == sorted(turns)
    with pytest.raises(UserError, match=f"yield {total} prompts of 8 tokens"):
        held_out_prompts(text_task, total + 1, 8)


def test_prompts_are_stable_and_fewer_are_the_first(text_task):
    def plain(prompts):
        return [(prompt.document, prompt.tokens.tolist()) for prompt in prompts]

    tokenizer = task_tokenizer(text_task)
    many = plain(held_out_prompts(text_task, 12, 5, tokenizer=tokenizer))
    assert plain(held_out_prompts(text_task, 4, 5)) == many[:4]
    other = plain(held_out_prompts(text_task, 12, 5, seed=1))
    assert other != many
    assert len({name for name, _ in many[:4]}) == 4


def test_no_prompts_asked_for(text_task):
    with pytest.raises(UserError, match="both must be 1 or more"):
        held_out_prompts(text_task, 0, 5)


def test_prompt_files(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"def f(x):\r\n\n  import \n")
    assert read_prompts_file(tmp_path / "a.txt") == ["def f(x):", "  import "]
    lines = b'{"prompt": "def f():\\n  "}\n{"prompt": "x", "id": 3}\n'
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert read_prompts_file(tmp_path / name) == ["def f():\n  ", "x"]


def test_bad_prompt_files(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none\.txt"):
        read_prompts_file(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(UserError, match=r"empty\.txt holds no prompt"):
        read_prompts_file(tmp_path / "empty.txt")
    (tmp_path / "void.jsonl").write_text('{"prompt": "x"}\n{"prompt": ""}\n')
    with pytest.raises(UserError, match="prompt 2 is empty: give at least one char"):
        read_prompts_file(tmp_path / "void.jsonl")
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"text": "y"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 2 .*'prompt'"):
        read_prompts_file(tmp_path / "a.jsonl")
