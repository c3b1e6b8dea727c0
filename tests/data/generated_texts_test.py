import dataclasses
import pathlib

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.corpora import EmptySplitError, split_documents
from bpd_jax.data.generations import open_generations, write_header, write_shard
from bpd_jax.data.packing import end_token, split_texts
from bpd_jax.data.row_preparation import prepare_rows
from bpd_jax.data.text_task import TextTask
from bpd_jax.data.tokenizer import Tokenizer, train_bpe
from tests.data.row_segments import segments

LENGTH = 16
V = 300


def texts_of(count: int, seed: int = 0) -> tuple[list[np.ndarray], list[int]]:
    """Random texts of 5 to 40 tokens, token 0 among them, and their prompts."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, V, rng.integers(5, 41)) for _ in range(count)]
    return texts, [int(rng.integers(0, len(text))) for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("texts")
    texts, prompts = texts_of(80)
    write_header(
        folder, base="abc", vocab_size=V, facts={"options": {"end_of_text": [7, 0]}}
    )
    write_shard(folder, 0, texts[:50], prompts[:50])
    write_shard(folder, 1, texts[50:], prompts[50:])
    train_bpe(["one two three"], 257).save(folder / "tokenizer.json")
    return folder


@pytest.fixture
def task(folder) -> TextTask:
    return TextTask("generations", str(folder), str(folder), validation_fraction=0.25)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_contain_every_text_with_generated_tokens_in_the_loss(
    folder, task, split, tmp_path
):
    texts = open_generations(folder)
    rows = prepare_rows(task, split, LENGTH, tmp_path / "rows")
    expected = []
    for row in split_texts(texts, split, 0.25):
        mask = np.arange(texts.lengths[row]) >= texts.prompt_lengths[row]
        for start in range(0, texts.lengths[row], LENGTH):
            piece = slice(start, start + LENGTH)
            if mask[piece][1:].any():
                expected.append((texts[row][piece].tolist(), mask[piece].tolist()))
    actual = segments(rows)
    assert actual == sorted(expected)
    assert any(not all(mask) for _, mask in actual)
    assert rows.num_tokens == sum(len(tokens) for tokens, _ in actual)
    assert rows.num_documents == len(split_texts(texts, split, 0.25))
    assert (rows.vocab_size, rows.end_of_text) == (V, 7)
    assert rows.waste < 0.25
    saved = Tokenizer.load(rows.folder)
    assert saved.to_json() == Tokenizer.load(folder).to_json()


def test_splits_are_disjoint_and_stable_when_texts_are_added(folder, tmp_path):
    texts = open_generations(folder)
    train, validation = (split_texts(texts, s, 0.25) for s in ("train", "validation"))
    assert sorted(train + validation) == split_texts(texts, "all", 0.25)
    assert 8 < len(validation) < 32
    # The same texts after others, and each twice.
    other_texts, _ = texts_of(5, seed=1)
    copied_texts = [texts[row] for row in range(len(texts))]
    write_header(tmp_path, base="abc", vocab_size=V, facts={})
    write_shard(
        tmp_path,
        0,
        [*other_texts, *copied_texts, *copied_texts],
        [0] * (5 + 2 * len(texts)),
    )
    held_out = set(split_texts(open_generations(tmp_path), "validation", 0.25))
    for copy in range(2):
        first = 5 + copy * len(texts)
        assert held_out & set(range(first, first + len(texts))) == {
            first + row for row in validation
        }


@pytest.mark.parametrize(
    "facts, end",
    [
        ({"options": {"end_of_text": 3}}, 3),
        ({"options": {"end_of_text": [4, 3]}}, 4),
        ({"options": {"end_of_text": None}}, None),
        ({"options": {"end_of_text": 9}}, None),
        ({"options": 3}, None),
        ({}, None),
    ],
)
def test_end_token_is_that_of_decoding(tmp_path, facts, end):
    write_header(tmp_path, base="abc", vocab_size=9, facts=facts)
    write_shard(tmp_path, 0, [np.array([1])], [0])
    assert end_token(open_generations(tmp_path)) == end


def test_invalid_generations_are_refused(folder, task, tmp_path):
    with pytest.raises(UserError, match="holds token ids and no text"):
        next(split_documents(task, "train"))
    elsewhere = dataclasses.replace(task, text_files=str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"distill\.json is missing"):
        prepare_rows(elsewhere, "train", LENGTH, tmp_path / "rows")
    write_header(tmp_path / "few", base="abc", vocab_size=200, facts={})
    write_shard(tmp_path / "few", 0, [np.array([1, 2])], [0])
    small_vocabulary = dataclasses.replace(task, text_files=str(tmp_path / "few"))
    with pytest.raises(UserError, match=r"has 257 tokens and the model .* 200: give"):
        prepare_rows(small_vocabulary, "train", LENGTH, tmp_path / "rows")
    with pytest.raises(EmptySplitError, match=r"none of the 1 texts .*generate more"):
        split_texts(open_generations(tmp_path / "few"), "validation", 1e-9)
    assert not (tmp_path / "rows").exists()
