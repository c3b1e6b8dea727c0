import dataclasses
import json

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.example_task import DATASETS, ExampleTask, task_from_json
from bpd_jax.data.text_task import TextTask


@pytest.mark.parametrize(
    "name, prompt",
    [
        ("squad", "question: {question} context: {context}"),
        ("cnn_dailymail", "summarize: {article}"),
        ("samsum", "Here is a dialogue: {dialogue}\nWrite a short summary!"),
        ("multi_news", "Write a summary based on this article: {document}"),
        ("xsum", "Summarize: {document}"),
        (
            "newsroom",
            "Please write a short summary for the following article: {title} {text}",
        ),
        ("c4", None),
        ("lambada", None),
    ],
)
def test_prompts_are_those_of_the_paper(name, prompt):
    """Braces and line ends in the texts stay as they are."""
    fields = ("question", "context", "article", "dialogue", "document", "title", "text")
    texts = {field: f"{{{field}}}\r\n" for field in fields} | {"passage": ""}
    expected = None if prompt is None else prompt.format(**texts)
    assert DATASETS[name].inputs(texts) == expected


def test_tasks_round_trip_through_json():
    for task in (
        ExampleTask("squad", files="a/{split}.jsonl", max_examples=3),
        ExampleTask("c4", data_dir="d", vocabulary="bpe:300"),
        TextTask("text_files", "a/*.txt", "bpe:300", 0.1, 1000),
    ):
        fields = json.loads(json.dumps(dataclasses.asdict(task)))
        assert task_from_json(fields) == task
    with pytest.raises(TypeError):
        task_from_json({"name": "squad", "corpus": "stdlib"})


def test_names_and_splits_of_tasks():
    assert ExampleTask("squad").seqio_name == "squad.gpt3"
    assert ExampleTask("xsum", files="x.jsonl").seqio_name == "xsum.files.gpt3"
    assert ExampleTask("c4", vocabulary="v.json").seqio_name == "c4.custom"
    assert TextTask(vocabulary="bpe:2048").name == "stdlib.bpe:2048"
    assert ExampleTask("squad").splits == ("train", "validation")
    assert ExampleTask("xsum").splits == ("train", "validation", "test")
    assert ExampleTask("xsum", files="x.jsonl").splits == ("train", "validation")
    assert "test" in ExampleTask("squad", files="{split}.jsonl").splits
    with pytest.raises(UserError, match=r"no split 'test'.*write \{split\} for the"):
        ExampleTask("xsum", files="x.jsonl").check_split("test")
    with pytest.raises(UserError, match="squad has no split 'test': use train or vali"):
        ExampleTask("squad").check_split("test")
    with pytest.raises(UserError, match="unknown split 'test'"):
        TextTask().check_split("test")


FILES, GENERATIONS = {"corpus": "text_files"}, {"corpus": "generations"}
TEXTS = {**GENERATIONS, "text_files": "texts"}


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        (ExampleTask, {"files": "a", "data_dir": "b"}, "are both given"),
        (ExampleTask, {"vocabulary": "bpe:1"}, "at least 257"),
        (ExampleTask, {"validation_fraction": 1.0}, "above 0 and below 1"),
        (TextTask, FILES, "needs text_files"),
        (TextTask, {"text_files": "a.txt"}, "set corpus to 'text_files'"),
        (TextTask, GENERATIONS, "generations needs text_files"),
        (TextTask, {**TEXTS, "vocabulary": "bpe:300"}, "are token ids"),
        (TextTask, {**TEXTS, "max_bytes": 9}, "are token ids"),
        (TextTask, {"vocabulary": "bpe:many"}, "at least 257"),
    ],
)
def test_error_names_the_invalid_field(kind, fields, message):
    name = {"name": "squad"} if kind is ExampleTask else {}
    with pytest.raises(UserError, match=message):
        kind(**name, **fields)
