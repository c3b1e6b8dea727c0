"""Data sets of examples with their prompts, and the settings of a task on one of them.

These are the eight data sets of Kim et al. 2024 (arXiv 2404.09221), section 5 and
appendix, in TensorFlow Datasets. Six have inputs and targets; the two without a prompt
are language modelling tasks.
"""

import dataclasses
import string
from collections.abc import Mapping
from typing import Annotated, TypeAlias

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import (
    Count,
    Path,
    Validated,
    check_value,
    choice,
    configurable,
    instance,
)
from bpd_jax.data.text_task import (
    GENERATIONS,
    SPLITS,
    Fraction,
    TextTask,
    short_vocabulary,
    trained_size,
)

ALL_SPLITS = (*SPLITS, "test")

# Separator between the inputs and the targets of an example in a row.
SEPARATOR = "\n"
# Placeholder for the name of a split in `ExampleTask.files`.
SPLIT = "{split}"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set, and the conversion of its records to inputs and targets.

    Attributes:
      tfds: name, configuration and version in TensorFlow Datasets.
      prompt: template of the inputs, with fields of a record in braces; None for
        language modelling, which has only targets.
      target: field of the targets. `a/b` is the list of texts `b` in the object `a`, of
        which the first is used.
      splits: names of the splits.
    """

    tfds: str
    prompt: str | None
    target: str
    splits: tuple[str, ...] = ALL_SPLITS

    @property
    def prompt_parts(self) -> tuple[tuple[str, str | None], ...]:
        """The prompt as literal texts, each with the field that follows it or None.

        >>> DATASETS["xsum"].prompt_parts
        (('Summarize: ', 'document'),)
        """
        parts = string.Formatter().parse(self.prompt or "")
        return tuple((literal, field) for literal, field, _, _ in parts)

    @property
    def prompt_fields(self) -> tuple[str, ...]:
        """The fields of the prompt, in order."""
        return tuple(field for _, field in self.prompt_parts if field)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of all fields that are read."""
        return (*self.prompt_fields, self.target)

    @property
    def topic(self) -> str:
        """The last field of the prompt, whose hash determines the split of a record.

        Records with the same value, such as the questions about one paragraph of SQuAD,
        are therefore in the same split.
        """
        return self.prompt_fields[-1] if self.prompt else self.target

    def inputs(self, texts: Mapping[str, str]) -> str | None:
        """The prompt with the fields of a record; None for language modelling."""
        return self.prompt.format_map(texts) if self.prompt else None


DATASETS = {
    "c4": Dataset("c4/en:3.1.0", None, "text", SPLITS),
    "lambada": Dataset("lambada:1.0.0", None, "passage"),
    "squad": Dataset(
        "squad/v1.1:3.0.0",
        "question: {question} context: {context}",
        "answers/text",
        SPLITS,
    ),
    "cnn_dailymail": Dataset(
        "cnn_dailymail:3.4.0", "summarize: {article}", "highlights"
    ),
    "samsum": Dataset(
        "samsum:1.0.0",
        "Here is a dialogue: {dialogue}\nWrite a short summary!",
        "summary",
    ),
    "multi_news": Dataset(
        "multi_news:2.1.0",
        "Write a summary based on this article: {document}",
        "summary",
    ),
    "xsum": Dataset("xsum:1.1.0", "Summarize: {document}", "summary"),
    "newsroom": Dataset(
        "newsroom:1.0.0",
        "Please write a short summary for the following article: {title} {text}",
        "summary",
    ),
}


@configurable
@dataclasses.dataclass(frozen=True)
class ExampleTask(Validated):
    """The examples of a data set: their source and their vocabulary.

    Attributes:
      name: name of the data set, one of `DATASETS`.
      data_dir: folder of TensorFlow Datasets that contains the prepared data set; None
        for its default folder.
      files: instead of TensorFlow Datasets, a glob of JSON Lines files (`.jsonl`,
        `.jsonl.gz`) with the same field names. `{split}` in it stands for `train`,
        `validation` and `test`; without it, the records are split into train and
        validation by hashes of the last field of the prompt.
      vocabulary: `gpt3`; `bpe:N`, trained on the train split; or the path of a
        tokenizer.json or of a folder that contains one.
      validation_fraction: share of the training records held out for validation, if
        `files` has no `{split}` or `validation_from` is `train`.
      validation_from: split that validation records are taken from: `validation`, or
        `train` if the task has no validation split or reports results on it, as SQuAD
        does. Records of JSON Lines are selected by hashes of the last field of the
        prompt; of TensorFlow Datasets the last records are used.
      max_examples: maximum number of examples of each split, from its beginning; None
        for all.
      packed: whether several examples share a row. Otherwise every example has a row
        of its own, so that a batch of B rows has B examples.
    """

    prefix = ""

    name: Annotated[str, choice(*DATASETS)]
    data_dir: Path | None = None
    files: Path | None = None
    vocabulary: Path = "gpt3"
    validation_fraction: Fraction = 0.02
    max_examples: Count | None = None
    validation_from: Annotated[str, choice(*SPLITS)] = "validation"
    packed: bool = True

    def check_together(self) -> None:
        """Refuses two sources, or an invalid vocabulary."""
        if self.files is not None and self.data_dir is not None:
            raise UserError(
                f"files={self.files!r} and data_dir={self.data_dir!r} are both given: "
                "records come either from JSON Lines or from TensorFlow Datasets; "
                "leave one out."
            )
        trained_size(self.vocabulary)

    @property
    def dataset(self) -> Dataset:
        """The data set."""
        return DATASETS[self.name]

    @property
    def has_inputs(self) -> bool:
        """Whether examples have inputs, so that only their targets are in the loss."""
        return self.dataset.prompt is not None

    @property
    def has_split_files(self) -> bool:
        """Whether `files` has a placeholder for the split."""
        return self.files is not None and SPLIT in self.files

    @property
    def divides_train(self) -> bool:
        """Whether validation records are taken from the split `train`."""
        return self.validation_from == "train"

    def source_split(self, split: str) -> str:
        """The split of the source that contains the records of `split`."""
        return self.validation_from if split == "validation" else split

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of its possible splits."""
        if self.files is None:
            return self.dataset.splits
        return ALL_SPLITS if self.has_split_files else SPLITS

    @property
    def trained_size(self) -> int | None:
        """N of the vocabulary `bpe:N`, or None for every other vocabulary."""
        return trained_size(self.vocabulary)

    @property
    def identity(self) -> dict[str, object]:
        """The settings that determine the texts of a split, without their location."""
        identity: dict[str, object] = {
            "dataset": self.dataset.tfds,
            "prompt": self.dataset.prompt,
            "files": self.files is not None,
            "max_examples": self.max_examples,
        }
        by_hash = self.files is not None and not self.has_split_files
        if by_hash or self.divides_train:
            identity["validation_fraction"] = self.validation_fraction
        if self.divides_train:
            identity["validation_from"] = self.validation_from
        if not self.packed:
            identity["packed"] = False
        return identity

    @property
    def seqio_name(self) -> str:
        """The name of the seqio task: `squad.gpt3`, or `squad.files.gpt3`."""
        source = "" if self.files is None else ".files"
        return f"{self.name}{source}.{short_vocabulary(self.vocabulary)}"

    def check_split(self, split: str) -> None:
        """Checks that the task may have this split."""
        if split in self.splits:
            return
        hint = ""
        if split in ALL_SPLITS and self.files is not None:
            hint = f" (write {SPLIT} for the name of the split in files={self.files!r})"
        raise UserError(
            f"{self.name} has no split {split!r}: use {' or '.join(self.splits)}{hint}."
        )


DataTask: TypeAlias = TextTask | ExampleTask

# The vocabulary size of GPT-2 and GPT-3, for hosts without their tokenizer.
_GPT3_TOKENS = 50257


@configurable
def vocabulary_size(task: DataTask) -> int:
    """Size of the vocabulary of a task, without training a tokenizer.

    For generations it is that of the model that generated them, which may be larger
    than that of its tokenizer.
    """
    from bpd_jax.data import generations, tokenizer

    check_value("vocabulary_size.task", task, instance(TextTask, ExampleTask))
    if isinstance(task, TextTask) and task.corpus == GENERATIONS:
        return int(generations.read_header(task.text_files or "")["vocab_size"])
    if task.trained_size is not None:
        return int(task.trained_size)
    if task.vocabulary == "gpt3":
        return _GPT3_TOKENS
    return tokenizer.named_tokenizer(task.vocabulary).vocab_size


def task_from_json(fields: Mapping[str, object]) -> DataTask:
    """Returns the task with these fields; the inverse of `dataclasses.asdict`.

    Fields that match neither class of tasks are a `TypeError`.
    """
    kind = ExampleTask if "name" in fields else TextTask
    return kind(**fields)  # type: ignore[arg-type]  # Raises the documented TypeError.
