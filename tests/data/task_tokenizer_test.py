import dataclasses

from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.task_tokenizer import source_fingerprint, vocabulary_fingerprint
from bpd_jax.data.text_task import TextTask


def test_fingerprint_of_text_depends_on_the_files(tmp_path):
    task = TextTask("text_files", str(tmp_path / "*.txt"))
    (tmp_path / "a.txt").write_text("one")
    first = source_fingerprint(task, "train")
    assert source_fingerprint(task, "validation") == first
    (tmp_path / "b.txt").write_text("two")
    second = source_fingerprint(task, "train")
    (tmp_path / "a.txt").write_text("another")
    assert len({first, second, source_fingerprint(task, "train")}) == 3


def test_fingerprint_of_examples_depends_on_the_files(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    task = ExampleTask("xsum", files=str(tmp_path / "{split}.jsonl"))
    first = source_fingerprint(task, "train")
    assert source_fingerprint(task, "train") == first
    (tmp_path / "train.jsonl").write_text("{}\n{}\n")
    assert source_fingerprint(task, "train") != first
    assert source_fingerprint(ExampleTask("xsum"), "train") == "xsum:1.1.0"


def test_fingerprint_of_examples_depends_on_the_text_of_a_trained_vocabulary(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("{}\n")
    fixed = ExampleTask("xsum", files=str(tmp_path / "{split}.jsonl"))
    trained = dataclasses.replace(fixed, vocabulary="bpe:300")
    before = [source_fingerprint(task, "validation") for task in (fixed, trained)]
    (tmp_path / "train.jsonl").write_text("{}\n{}\n")
    assert source_fingerprint(fixed, "validation") == before[0]
    assert source_fingerprint(trained, "validation") != before[1]


def test_fingerprint_of_a_vocabulary_depends_on_its_content(tmp_path):
    assert vocabulary_fingerprint(TextTask(vocabulary="bpe:280")) == "bpe:280"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("same")
    a, b = (
        dataclasses.replace(TextTask(), vocabulary=str(tmp_path / name))
        for name in "ab"
    )
    assert vocabulary_fingerprint(a) == vocabulary_fingerprint(b)
    (tmp_path / "b" / "tokenizer.json").write_text("different")
    assert vocabulary_fingerprint(a) != vocabulary_fingerprint(b)
