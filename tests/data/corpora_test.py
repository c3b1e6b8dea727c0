import dataclasses
import pathlib
import sysconfig

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data import corpora
from bpd_jax.data.corpora import Document
from bpd_jax.data.text_task import TextTask


def ids(documents):
    return [document.id for document in documents]


def files_task(pattern, **fields):
    return TextTask(corpus="text_files", text_files=str(pattern), **fields)


def test_documents_are_in_the_order_of_files(text_task, corpus_folder):
    documents = list(corpora.all_documents(text_task))
    names = [
        path.relative_to(corpus_folder).as_posix()
        for path in corpus_folder.rglob("*.txt")
    ]
    assert ids(documents) == sorted(names)
    for document in documents:
        assert document.text.encode() == (corpus_folder / document.id).read_bytes()


def test_json_lines_are_documents_and_empty_texts_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": ""}\n{"text": "y"}\n')
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.md").write_text("z")
    documents = list(corpora.all_documents(files_task(tmp_path / "*")))
    assert documents == [
        Document("a.jsonl:1", "x"),
        Document("a.jsonl:3", "y"),
        Document("c.md", "z"),
    ]


@pytest.mark.parametrize("pattern", ["**/*.txt", "**/**/*.txt"])
def test_ids_do_not_depend_on_the_location_or_the_pattern(
    text_task, corpus_folder, pattern, monkeypatch
):
    monkeypatch.chdir(corpus_folder)
    relative = dataclasses.replace(text_task, text_files=pattern)
    assert ids(corpora.all_documents(relative)) == ids(corpora.all_documents(text_task))


def test_splits_partition_the_corpus(text_task):
    train = ids(corpora.split_documents(text_task, "train"))
    validation = ids(corpora.split_documents(text_task, "validation"))
    assert sorted(train + validation) == ids(corpora.all_documents(text_task))
    # A larger fraction only adds to the validation split.
    larger_fraction = dataclasses.replace(text_task, validation_fraction=0.5)
    assert set(validation) < set(
        ids(corpora.split_documents(larger_fraction, "validation"))
    )


def test_fractions_are_stable():
    # They determine which documents earlier models were not trained on.
    assert corpora.fraction_of("split", "a.txt") == 0.9874772114099599
    assert corpora.fraction_of("order", "a.txt") == 0.2290216370826208
    assert corpora.fraction_of("split", "é/b.jsonl:3") == 0.5329898470180403


@pytest.mark.parametrize("limit", [0, 1, 57, 400, 10**6])
def test_sample_is_the_prefix_in_hash_order(text_task, limit):
    documents = list(corpora.all_documents(text_task))
    expected, total = set(), 0
    for document in sorted(
        documents, key=lambda document: corpora.fraction_of("order", document.id)
    ):
        total += len(document.text.encode())
        if total > limit:
            total -= len(document.text.encode())
            break
        expected.add(document.id)
    assert corpora.sample_ids(documents, limit) == (expected, total)
    assert corpora.sample_ids(documents[::-1], limit) == (expected, total)


def test_max_bytes_limits_both_splits_together(text_task):
    small = dataclasses.replace(text_task, max_bytes=900)
    sampled = [
        document
        for split in ("train", "validation")
        for document in corpora.split_documents(small, split)
    ]
    assert 600 < sum(len(document.text.encode()) for document in sampled) <= 900
    train = set(ids(corpora.split_documents(text_task, "train")))
    assert set(ids(corpora.split_documents(small, "train"))) < train


def test_stdlib_has_sources_and_no_tests():
    documents = corpora.all_documents(TextTask())
    texts = dict(documents)
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    assert texts["json/decoder.py"] == (root / "json" / "decoder.py").read_text("utf-8")
    assert any(name.startswith("pydoc_data/") for name in texts)
    assert list(texts) == sorted(texts)
    parts = {part for name in texts for part in name.split("/")[:-1]}
    assert not parts & {"site-packages", "test", "tests", "__pycache__"}


def test_stdlib_skips_files_that_are_not_utf8(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("x = 'é'\n", encoding="utf-8")
    (tmp_path / "old.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert ids(corpora.all_documents(TextTask())) == ["good.py"]


def test_corpora_without_text_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="no Python sources"):
        list(corpora.all_documents(TextTask()))
    with pytest.raises(UserError, match=r"text_files='.*\*\.txt' matches no file"):
        list(corpora.all_documents(files_task(tmp_path / "*.txt")))
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="holds no text"):
        list(corpora.split_documents(files_task(tmp_path / "a.txt"), "train"))


@pytest.mark.parametrize("fraction, empty", [(0.001, "validation"), (0.999, "train")])
def test_empty_splits_are_refused(text_task, fraction, empty):
    task = dataclasses.replace(text_task, validation_fraction=fraction)
    with pytest.raises(corpora.EmptySplitError, match=f"into the {empty} split at"):
        list(corpora.split_documents(task, "train"))


def test_all_accepts_a_single_document(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    task = files_task(tmp_path / "a.txt")
    assert ids(corpora.split_documents(task, "all")) == ["a.txt"]
