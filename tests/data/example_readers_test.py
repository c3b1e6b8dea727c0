import dataclasses
import gzip

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.corpora import EmptySplitError
from bpd_jax.data.example_readers import (
    example_files,
    existing_splits,
    read_examples,
)
from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.task_tokenizer import task_tokenizer
from tests.json_lines import write_json_lines

XSUM = {"document": "text", "summary": "short", "id": "1"}


def test_examples_are_in_the_order_of_files_and_lines(squad_task):
    examples = list(read_examples(squad_task, "train"))
    assert len(examples) == 60
    assert examples[0].id == "train-0.jsonl.gz:1"
    assert examples[21].id == "train-1.jsonl.gz:2"
    assert examples[4].inputs.startswith(
        "question: !4 😀? context: naïve <|endoftext|> t"
    )
    assert examples[4].targets == "five nine three seven one five nine"
    assert len(list(read_examples(squad_task, "validation"))) == 12
    assert existing_splits(squad_task) == ("train", "validation")


@pytest.mark.parametrize("single", [True, False], ids=["one file", "validation_from"])
def test_one_split_is_divided_by_the_topic_of_records(tmp_path, squad_task, single):
    """Both parts together are the split `train`; no paragraph is in both."""
    lines = b""
    for file in example_files(squad_task, "train"):
        lines += gzip.decompress(file.path.read_bytes())
    (tmp_path / "all.jsonl").write_bytes(lines)
    changes = {"files": str(tmp_path / "all.jsonl")} if single else {}
    changes |= {} if single else {"validation_from": "train"}
    task = dataclasses.replace(squad_task, validation_fraction=0.3, **changes)
    train, held_out = (
        sorted(example[1:] for example in read_examples(task, split))
        for split in ("train", "validation")
    )
    undivided = [example[1:] for example in read_examples(squad_task, "train")]
    assert sorted(train + held_out) == sorted(undivided)
    topics = [
        {inputs.partition("context: ")[2] for inputs, _ in part}
        for part in (train, held_out)
    ]
    assert all(topics)
    assert topics[0].isdisjoint(topics[1])
    with pytest.raises(UserError, match=r"validation_from .*'test'"):
        dataclasses.replace(squad_task, validation_from="test")


def test_examples_without_a_target_are_skipped(tmp_path):
    task = ExampleTask("xsum", files=str(tmp_path / "{split}.jsonl"))
    empty = [{**XSUM, "summary": summary} for summary in ("", None)]
    write_json_lines(tmp_path / "train.jsonl", [*empty, XSUM])
    assert [example.id for example in read_examples(task, "train")] == ["train.jsonl:3"]
    write_json_lines(tmp_path / "train.jsonl", [*empty])
    with pytest.raises(EmptySplitError, match=r"train split of xsum is .*'summary'"):
        list(read_examples(task, "train"))
    # The fields of the prompt must exist.
    write_json_lines(tmp_path / "train.jsonl", [{**XSUM, "document": None}])
    with pytest.raises(UserError, match="line 1 has no text in the field 'document'"):
        list(read_examples(task, "train"))


@pytest.mark.parametrize(
    "answers", [None, *({"text": texts} for texts in (None, [], [None], [""]))]
)
def test_targets_are_first_answers_and_questions_without_one_are_skipped(
    tmp_path, answers
):
    record = {"question": "q", "context": "c", "answers": {"text": ["one", "two"]}}
    write_json_lines(tmp_path / "train.jsonl", [{**record, "answers": answers}, record])
    task = ExampleTask("squad", files=str(tmp_path / "{split}.jsonl"))
    assert [example.targets for example in read_examples(task, "train")] == ["one"]


def test_missing_files_and_other_formats_are_refused(tmp_path):
    task = ExampleTask("xsum", files=str(tmp_path / "{split}.jsonl"))
    with pytest.raises(UserError, match=r"files='.*train\.jsonl' matches no file"):
        list(read_examples(task, "train"))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UserError, match=r"a\.csv of files=.* is not JSON Lines"):
        list(read_examples(ExampleTask("xsum", files=str(tmp_path / "*")), "train"))


def test_vocabulary_is_trained_on_inputs_and_targets(squad_task):
    task = dataclasses.replace(squad_task, vocabulary="bpe:300")
    tokenizer = task_tokenizer(task)
    assert tokenizer.vocab_size == 300
    assert task_tokenizer(task) is tokenizer
    assert len(tokenizer.encode("question: context:")) < len("question: context:")
