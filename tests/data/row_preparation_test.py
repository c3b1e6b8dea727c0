import dataclasses
import importlib.util
import json
import pathlib

import numpy as np
import pytest

from bpd_jax.data import row_preparation
from bpd_jax.data.corpora import split_documents
from bpd_jax.data.row_preparation import prepare_rows
from bpd_jax.data.task_tokenizer import task_tokenizer
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.errors import UserError

LENGTH = 32


def contents(folder):
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


@pytest.fixture(scope="module")
def train(text_task, tmp_path_factory):
    return prepare_rows(
        text_task, "train", LENGTH, tmp_path_factory.mktemp("prepared") / "train"
    )


def test_rows_hold_every_piece_of_every_document(text_task, train):
    tokenizer = task_tokenizer(text_task)
    expected = []
    documents = list(split_documents(text_task, "train"))
    for _, text in documents:
        end = tokenizer.end_of_text
        framed = [end, *tokenizer.encode(text), end]
        expected += [framed[i : i + LENGTH] for i in range(0, len(framed), LENGTH)]
    got = []
    batch = train.batch(slice(None))
    for tokens, ids in zip(batch.tokens, batch.segment_ids, strict=True):
        got += [tokens[ids == s].tolist() for s in range(1, ids.max() + 1)]
    assert sorted(got) == sorted(expected)
    assert train.num_tokens == sum(map(len, expected)) == batch.loss_mask.sum()
    assert train.num_documents == len(documents)
    assert train.waste < 0.15


def test_rows_describe_themselves(text_task, train):
    assert (train.split, train.length) == ("train", LENGTH)
    assert (train.vocabulary, train.vocab_size) == ("bpe:280", 280)
    assert train.end_of_text == task_tokenizer(text_task).end_of_text
    assert train.tokens.dtype == train.segment_ids.dtype == np.uint16
    # The folder serves as the vocabulary of another task.
    saved = Tokenizer.load(train.folder)
    assert saved.to_json() == task_tokenizer(text_task).to_json()
    about = json.loads((train.folder / "rows.json").read_text())
    assert about["task"] == dataclasses.asdict(text_task)
    assert sorted(contents(train.folder)) == [
        "rows.json",
        "segment_ids.npy",
        "tokenizer.json",
        "tokens.npy",
    ]


def test_preparing_again_gives_the_same_bytes(text_task, train, tmp_path):
    again = prepare_rows(text_task, "train", LENGTH, tmp_path / "again")
    assert contents(again.folder) == contents(train.folder)


def test_ready_rows_are_used_and_those_of_another_task_are_kept(
    text_task, tmp_path, monkeypatch
):
    made = []
    original = row_preparation._make_rows
    monkeypatch.setattr(
        row_preparation, "_make_rows", lambda *rest: (made.append(1), original(*rest))
    )
    folder = tmp_path / "rows"
    prepare_rows(text_task, "validation", LENGTH, folder)
    prepare_rows(text_task, "validation", LENGTH, folder)
    assert len(made) == 1
    before = contents(folder)
    smaller = dataclasses.replace(text_task, max_bytes=1500)
    for task, split, length, name in (
        (text_task, "validation", LENGTH // 2, "length"),
        (text_task, "train", LENGTH, "split"),
        (smaller, "validation", LENGTH, "max_bytes"),
    ):
        with pytest.raises(UserError, match=f"holds other rows: {name} is "):
            prepare_rows(task, split, length, folder)
    assert len(made) == 1
    assert contents(folder) == before
    # Damaged rows are made again.
    (folder / "tokens.npy").write_bytes(b"")
    prepare_rows(text_task, "validation", LENGTH, folder)
    assert contents(folder) == before


def eight_texts(folder, text_task):
    """A task of short files, half of which are for validation."""
    for name in "abcdefgh":
        (folder / f"{name}.txt").write_text(f"{name}: one two three")
    return dataclasses.replace(
        text_task,
        text_files=str(folder / "*.txt"),
        vocabulary="gpt3",
        validation_fraction=0.5,
    )


def test_changed_text_makes_new_rows(tmp_path, text_task):
    task = eight_texts(tmp_path, text_task)
    first = prepare_rows(task, "train", 16, tmp_path / "rows").num_documents
    for name in "ijklmnop":
        (tmp_path / f"{name}.txt").write_text(f"{name}: one two three")
    assert prepare_rows(task, "train", 16, tmp_path / "rows").num_documents > first


def test_host_without_seqio_uses_what_was_prepared(text_task, train, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "seqio" else found(name, *rest),
    )
    elsewhere = dataclasses.replace(text_task, text_files="not/on/this/host/*.txt")
    assert len(prepare_rows(elsewhere, "train", LENGTH, train.folder)) == len(train)
    with pytest.raises(UserError, match="seqio is not installed"):
        prepare_rows(elsewhere, "train", LENGTH + 1, train.folder)


def test_failure_leaves_the_old_rows(text_task, tmp_path):
    task = eight_texts(tmp_path, text_task)
    rows = prepare_rows(task, "train", 16, tmp_path / "rows")
    before = contents(rows.folder)
    (tmp_path / "z.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"z\.txt is not UTF-8"):
        prepare_rows(task, "train", 16, tmp_path / "rows")
    assert contents(rows.folder) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_other_folders_are_not_touched(text_task, tmp_path):
    (tmp_path / "precious.txt").write_text("keep")
    with pytest.raises(UserError, match="not part of token files"):
        prepare_rows(text_task, "train", LENGTH, tmp_path)
    assert contents(tmp_path) == {"precious.txt": b"keep"}
    foreign = tmp_path / "theirs"
    foreign.mkdir()
    (foreign / "rows.json").write_text("[1, 2, 3]")
    with pytest.raises(UserError, match="is not that of token files"):
        prepare_rows(text_task, "train", LENGTH, foreign)
    assert contents(foreign) == {"rows.json": b"[1, 2, 3]"}
    with pytest.raises(UserError, match="name a folder"):
        prepare_rows(text_task, "train", LENGTH, tmp_path / "precious.txt")


@pytest.mark.parametrize("length", [0, 1, 65536])
def test_bad_length(text_task, tmp_path, length):
    with pytest.raises(UserError, match=f"length is {length}"):
        prepare_rows(text_task, "train", length, tmp_path / "rows")
