"""The examples of studies: the paper's seven tasks and Spec-Bench's six.

The paper's tasks are read from the same files as for training: JSON Lines with the
field names of TensorFlow Datasets in `FOLDER/NAME/SPLIT.jsonl.gz`, or data sets that
TensorFlow Datasets has prepared in FOLDER (its `data_dir`). Prompts are those of
`bpd_jax.data`. Spec-Bench is `FOLDER/spec_bench/test.jsonl.gz`; its conversations
(MT-Bench) are one task, and each of their eight categories is also a task. The task
`held_out` needs no FOLDER: its prompts are the beginnings of held-out documents of the
model's training corpus.
"""

import dataclasses
import itertools
import json
import pathlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bpd_jax.base import reading
from bpd_jax.base.errors import UserError
from bpd_jax.data import text_readers
from bpd_jax.data.example_task import DATASETS, SEPARATOR, ExampleTask
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.storage import files
from bpd_jax.studies.study_records import REPORT, TUNE

HELD_OUT = "held_out"
LAMBADA = "lambada"
"""The task whose passages are scored, and whose prompts never use a chat template."""
PAPER_TASKS = {
    LAMBADA: "LAMBADA",
    "squad": "SQuAD",
    "cnn_dailymail": "CNN/DM",
    "samsum": "SAMSum",
    "multi_news": "MultiNews",
    "xsum": "XSum",
    "newsroom": "NewsRoom",
}
SPEC_BENCH = {
    "mt_bench": "MT-Bench",
    "translation": "translation",
    "summarization": "summaries",
    "qa": "QA",
    "math_reasoning": "math",
    "rag": "RAG",
}
MT_BENCH = {
    name: f"MT-Bench: {name}"
    for name in (
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    )
}
"""The categories of the task `mt_bench`, which are also tasks."""
TASK_LABELS = {**PAPER_TASKS, **SPEC_BENCH, **MT_BENCH, HELD_OUT: "held-out text"}
"""Display names of tasks."""

# In order of preference; the paper reports on the first one.
_SPLITS = ("test", "validation", "sample")
_TRAIN = "train"
# Number of characters at the beginning of a document that identify it.
_BEGINNING = 200


@dataclasses.dataclass(frozen=True)
class TaskRecord:
    """A record of a task, before it is tokenized.

    Attributes:
      task: name of the task.
      document: long text, which may be truncated; or "".
      before, after: text of the prompt before and after the document.
      references: correct answers, if any.
      follow_ups: the user's later messages, one after each answer of the model.
    """

    task: str
    document: str
    before: str
    after: str
    references: tuple[str, ...]
    follow_ups: tuple[str, ...] = ()

    @property
    def beginning(self) -> str:
        """The beginning of the document, which identifies it."""
        return (self.document or self.before).strip()[:_BEGINNING]

    @property
    def identity(self) -> tuple[str, str]:
        """What no other record of the task has: its document, and what is asked of it.

        SQuAD asks several questions on a document.
        """
        return self.beginning, self.before if self.document else ""


@dataclasses.dataclass(frozen=True)
class StudyExample:
    """A tokenized example of a task.

    Attributes:
      index: index in the task, from 0, the same for every study of a configuration.
      part: `TUNE` or `REPORT`.
      prompt: text of the prompt.
      input_ids: tokens of the prompt, with the chat template, `[T]` int32.
      references: correct answers, if any.
      beginning: see `TaskRecord.beginning`.
      follow_ups: see `TaskRecord.follow_ups`.
    """

    index: int
    part: str
    prompt: str
    input_ids: np.ndarray
    references: tuple[str, ...]
    beginning: str = ""
    follow_ups: tuple[str, ...] = ()


def read_sources(
    data: pathlib.Path,
    task: str,
    splits: Sequence[str] = _SPLITS,
    *,
    kept: bool = True,
) -> Iterator[TaskRecord]:
    """Yields the records of a task whose text is not empty.

    Args:
      data: folder of JSON Lines, or of TensorFlow Datasets.
      task: name of the task.
      splits: splits in order of preference; the first existing one is read.
      kept: whether the caller keeps all records, which must then fit into memory.
    """
    if task in SPEC_BENCH or task in MT_BENCH:
        yield from _spec_bench(data, task)
        return
    if task not in PAPER_TASKS:
        raise UserError(f"there is no task {task!r}: use {', '.join(TASK_LABELS)}.")
    about = DATASETS[task]
    for record in _task_records(data, task, splits, kept=kept):
        document = _texts(record, about.topic)
        if not document or not document[0]:
            continue
        if about.prompt is None:
            # A truncated passage would end with another last word.
            yield TaskRecord(task, "", document[0], "", ())
            continue
        topic = about.topic
        parts = [
            literal
            + ("" if name in (None, topic) else "".join(_texts(record, name)[:1]))
            for literal, name in about.prompt_parts
        ]
        end = 1 + [name for _, name in about.prompt_parts].index(topic)
        before, after = "".join(parts[:end]), "".join(parts[end:])
        references = tuple(_texts(record, about.target))
        yield TaskRecord(task, document[0], before, after, references)


def _spec_bench(data: pathlib.Path, task: str) -> Iterator[TaskRecord]:
    for record in _records(data / "spec_bench", _SPLITS):
        category = str(record.get("category"))
        # The eight categories of MT-Bench are one of Spec-Bench's six.
        kind = category if category in SPEC_BENCH else "mt_bench"
        turns = _texts(record, "turns")
        if not turns or task not in (category, kind):
            continue
        # References of the first turn: one text, or a list of correct answers.
        answers = record.get("reference")
        first = answers[0] if isinstance(answers, list) and answers else None
        references = tuple(_texts({"first": first}, "first"))
        # An article may be truncated, but not a prompt that ends with its question.
        before, instruction, article = turns[0].partition("Summarize: ")
        if task == "summarization" and instruction and not before:
            yield TaskRecord(task, article, instruction, "", references)
        else:
            yield TaskRecord(task, "", turns[0], "", references, tuple(turns[1:]))


def _prepared_splits(data: pathlib.Path, task: str) -> list[str]:
    """The splits of a task that TensorFlow Datasets has prepared in a folder."""
    folder = data / DATASETS[task].tfds.replace(":", "/")
    try:
        info = files.read_json(folder / "dataset_info.json")
        return [split["name"] for split in info["splits"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _task_records(
    data: pathlib.Path, task: str, splits: Sequence[str], *, kept: bool
) -> Iterator[dict[str, Any]]:
    """The records of the first split that exists, in either format."""
    lines = any(has_split(data, task, split) for split in (*splits, _TRAIN))
    prepared = [] if lines else _prepared_splits(data, task)
    split = next((split for split in splits if split in prepared), None)
    if split is None:
        yield from _records(data / task, splits, kept=kept)
        return
    # Importing TensorFlow takes seconds and is not needed for JSON Lines.
    from bpd_jax.data.tfds_source import tfds_records

    yield from tfds_records(ExampleTask(task, data_dir=str(data)), split)


def _records(
    folder: pathlib.Path, splits: Sequence[str], *, kept: bool = True
) -> Iterator[dict[str, Any]]:
    """The records of the first split that exists, in order."""
    for split in splits:
        for ending in ("jsonl.gz", "jsonl"):
            path = folder / f"{split}.{ending}"
            if not path.is_file():
                continue
            for number, line in text_readers.read_lines(path, kept=kept):
                try:
                    record = reading.parse_json(line)
                    if "\\u" in line:
                        # Fails for a lone surrogate, which the records of a study,
                        # as UTF-8, could not contain.
                        json.dumps(record, ensure_ascii=False).encode()
                except ValueError as error:
                    raise UserError(
                        f"{path}:{number} is not valid JSON: {error}."
                    ) from error
                if not isinstance(record, dict):
                    raise UserError(f"{path}:{number} is not a JSON object.")
                yield record
            return
    raise UserError(
        f"{folder} has none of {', '.join(f'{name}.jsonl.gz' for name in splits)}, and "
        f"{folder.parent} contains no data set of TensorFlow Datasets of that name: "
        "give a folder of either kind with --data."
    )


def _texts(record: dict[str, Any], field: str) -> list[str]:
    """The texts in a field; `a/b` is the field b of the object a."""
    value: Any = record
    for part in field.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def plain_text(loaded: LanguageModel, output: Iterable[int] | np.ndarray) -> str:
    """The text of decoded tokens before the end of text, without surrounding spaces."""
    ends = loaded.end_tokens
    tokens = itertools.takewhile(lambda token: token not in ends, output)
    return loaded.tokenizer.decode(map(int, tokens)).strip()


def draw_examples(
    sources: Sequence[TaskRecord],
    loaded: LanguageModel,
    *,
    examples: int,
    tune: int,
    longest: int,
    longest_whole: int,
) -> list[StudyExample]:
    """Draws examples in an order that depends only on the number of records.

    No record is drawn twice, even if its file repeats it; all questions of SQuAD on one
    document are records of their own.

    Args:
      sources: all records of a task.
      loaded: the model that the prompts are encoded for.
      examples, tune: number of reported and of tuning examples.
      longest: maximum number of tokens of a prompt with a document, which is truncated.
      longest_whole: maximum number of tokens of a prompt without a document; longer
        prompts are left out.
    """
    order = list(range(len(sources)))
    random.Random(0).shuffle(order)
    drawn: list[StudyExample] = []
    identities: set[tuple[str, str]] = set()
    for number in order:
        if len(drawn) == examples + tune:
            break
        source = sources[number]
        if source.identity in identities:
            continue
        fitted = _fitted(source, loaded, longest if source.document else longest_whole)
        if fitted is None:
            continue
        identities.add(source.identity)
        part = TUNE if len(drawn) < tune else REPORT
        drawn.append(
            StudyExample(
                len(drawn),
                part,
                *fitted,
                source.references,
                source.beginning,
                source.follow_ups,
            )
        )
    return drawn


def has_split(data: pathlib.Path, task: str, split: str) -> bool:
    """Whether there is a JSON Lines file of a split."""
    names = (f"{split}.jsonl.gz", f"{split}.jsonl")
    return any((data / task / name).is_file() for name in names)


def has_train(data: pathlib.Path, task: str) -> bool:
    """Whether the task has a training split, in either format."""
    return has_split(data, task, _TRAIN) or _TRAIN in _prepared_splits(data, task)


def undrawn_texts(
    sources: Iterable[TaskRecord], drawn: Sequence[StudyExample], count: int
) -> Iterator[str]:
    """Yields texts of up to `count` records whose documents were not drawn, each once.

    A text has the same form as in finetuning: the task's complete prompt, for example
    with SQuAD's question, and the first correct answer on a separate line.
    """
    beginnings = {example.beginning for example in drawn}
    # Hashes, because a training split has a million records.
    seen: set[int] = set()
    for source in sources:
        if count == 0:
            break
        identity = hash(source.identity)
        if source.beginning not in beginnings and identity not in seen:
            seen.add(identity)
            count -= 1
            prompt = source.before + source.document + source.after
            yield SEPARATOR.join([prompt, *source.references[:1]])


def _fitted(
    source: TaskRecord, loaded: LanguageModel, longest: int
) -> tuple[str, np.ndarray] | None:
    """Prompt and tokens, with the document truncated to fit; None if impossible."""
    after = source.after
    if source.task == LAMBADA:
        loaded = loaded.without_chat()
    elif loaded.chat is None:
        # Such a model was trained on prompt, separator and target.
        after += SEPARATOR
    document = source.document
    tokens = loaded.tokenizer.encode(document)
    while True:
        prompt = source.before + document + after
        ids = loaded.encode_prompt(prompt)
        excess = len(ids) - longest
        if excess <= 0:
            return prompt, ids
        if excess >= len(tokens):
            return None
        tokens = tokens[: len(tokens) - excess]
        document = loaded.tokenizer.decode(tokens).rstrip("\ufffd")
