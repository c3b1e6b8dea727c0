import dataclasses

from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.task_tokenizer import source_fingerprint, vocabulary_fingerprint
from bpd_jax.data.text_task import TextTask


def test_fingerprint_of_text_depends_on_the_files(tmp_path):
    task = TextTask("text_files", str(tmp_path / "*.txt"))
    fingerprints = set()
    for name, text in (("a", "one"), ("b", "two"), ("a", "another")):
        (tmp_path / f"{name}.txt").write_text(text)
        fingerprints.add(source_fingerprint(task, "train"))
        assert source_fingerprint(task, "validation") in fingerprints
    assert len(fingerprints) == 3


def test_fingerprint_of_examples_depends_on_the_files_that_are_read(tmp_path):
    """A vocabulary that is trained reads those of the train split too."""
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("{}\n")
    fixed = ExampleTask("xsum", files=str(tmp_path / "{split}.jsonl"))
    trained = dataclasses.replace(fixed, vocabulary="bpe:300")
    cases = ((fixed, "train"), (fixed, "validation"), (trained, "validation"))
    before = [source_fingerprint(*case) for case in cases]
    (tmp_path / "train.jsonl").write_text("{}\n{}\n")
    after = [source_fingerprint(*case) for case in cases]
    assert [a != b for a, b in zip(after, before, strict=True)] == [True, False, True]
    assert source_fingerprint(ExampleTask("xsum"), "train") == "xsum:1.1.0"


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
