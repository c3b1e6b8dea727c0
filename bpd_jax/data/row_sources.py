"""Rows of documents, examples and generated texts, before they are stored."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.data.example_pieces import Truncation, cut_documents, join_examples
from bpd_jax.data.example_task import SEPARATOR, DataTask, ExampleTask
from bpd_jax.data.generated_pieces import cut_texts, end_token, split_texts
from bpd_jax.data.generations import open_generations
from bpd_jax.data.packing import pack, pad
from bpd_jax.data.text_task import GENERATIONS, TextTask
from bpd_jax.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Shard:
    """One of `count` disjoint parts of a split; `index` counts from 0."""

    index: int
    count: int


WHOLE = Shard(0, 1)


class PackedRow(NamedTuple):
    """One row, `[T]` each; see `rows.Batch`."""

    tokens: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray


class RowSource(NamedTuple):
    """The rows of a split, and their properties.

    Attributes:
      rows: iterator over the rows, which can be read once.
      documents: returns the number of documents or examples read so far.
      vocab_size: V.
      end_of_text: the token that ends a document.
      has_context: whether some tokens are not in the loss.
      truncation: counts of truncated examples so far; None if nothing is truncated.
    """

    rows: Iterator[PackedRow]
    documents: Callable[[], int]
    vocab_size: int
    end_of_text: int
    has_context: bool
    truncation: Truncation | None = None


def open_source(
    task: DataTask,
    split: str,
    length: int,
    vocabulary: Tokenizer,
    shard: Shard = WHOLE,
    cache_dir: str | None = None,
) -> RowSource:
    """Returns the rows of a split.

    Args:
      task: source and vocabulary.
      split: one of its splits.
      length: tokens of a row, T.
      vocabulary: the task's tokenizer.
      shard: part of the split.
      cache_dir: folder in which `cache_pipeline.cache_task` cached the tokens; None
        reads the text.

    Raises:
      UserError: the source or vocabulary is invalid.
    """
    if isinstance(task, TextTask) and task.corpus == GENERATIONS:
        return _generated_rows(task, split, length, vocabulary, shard)
    return _seqio_rows(task, split, length, vocabulary, shard, cache_dir)


def _seqio_rows(
    task: DataTask,
    split: str,
    length: int,
    vocabulary: Tokenizer,
    shard: Shard,
    cache_dir: str | None,
) -> RowSource:
    # Imported late: these modules take seconds to import.
    from bpd_jax.data import seqio_cache, seqio_tasks

    part = None
    if shard.count > 1:
        part = seqio_tasks.seqio.ShardInfo(shard.index, shard.count)
    total = None
    if cache_dir is not None:
        examples = seqio_cache.read_examples(task, cache_dir, split, part)
    else:
        seqio_task = seqio_tasks.get_task(task, label=f"rows {split}")
        dataset = seqio_task.get_dataset(split=split, shuffle=False, shard_info=part)
        examples = seqio_tasks.examples(dataset, seqio_task.source)
        total = seqio_task.source.num_input_examples(split)
    bar = progress.bar(
        examples,
        label=f"rows {split}",
        total=None if total is None else round(total / shard.count),
        unit=" examples",
        # A `TextTask` shows a progress bar over its text.
        disable=isinstance(task, TextTask) and cache_dir is None,
    )
    num_read = 0

    def read_examples() -> Iterator[Mapping[str, np.ndarray]]:
        nonlocal num_read
        for example in bar:
            num_read += 1
            yield example

    rows: Iterator[PackedRow]
    has_inputs = isinstance(task, ExampleTask) and task.has_inputs
    fill = pad if isinstance(task, ExampleTask) and not task.packed else pack
    if has_inputs:
        truncation = Truncation()
        separator = len(vocabulary.encode(SEPARATOR))
        pieces = join_examples(read_examples(), length, separator, truncation)
        rows = (
            PackedRow(row[:, 0], segment_ids, row[:, 1])
            for row, segment_ids in fill(pieces, length)
        )
    else:
        truncation = None
        documents = (example["targets"] for example in read_examples())
        rows = (
            PackedRow(row, segment_ids, segment_ids != 0)
            for row, segment_ids in fill(cut_documents(documents, length), length)
        )
    return RowSource(
        rows=rows,
        documents=lambda: num_read,
        vocab_size=vocabulary.vocab_size,
        end_of_text=vocabulary.end_of_text,
        has_context=has_inputs,
        truncation=truncation,
    )


def _generated_rows(
    task: TextTask, split: str, length: int, vocabulary: Tokenizer, shard: Shard
) -> RowSource:
    texts = open_generations(task.text_files or "")
    if vocabulary.vocab_size > texts.vocab_size:
        raise UserError(
            f"the vocabulary {task.vocabulary} has {vocabulary.vocab_size} tokens and "
            f"the model that generated {texts.folder} has {texts.vocab_size}: give the "
            "tokenizer.json of that model."
        )
    indices = split_texts(texts, split, task.validation_fraction)
    indices = indices[shard.index :: shard.count]
    bar = progress.bar(indices, label=f"rows {split}", unit=" texts")
    end = end_token(texts)
    return RowSource(
        rows=(
            PackedRow(row[:, 0], segment_ids, row[:, 1])
            for row, segment_ids in pack(cut_texts(texts, bar, length), length)
        ),
        documents=lambda: len(indices),
        # A model may have more tokens than its tokenizer.
        vocab_size=texts.vocab_size,
        end_of_text=vocabulary.end_of_text if end is None else end,
        has_context=True,
    )


def describe_source(source: RowSource) -> dict[str, Any]:
    """The fields of `rows.json` that describe a source, after its rows were read."""
    fields: dict[str, Any] = {
        "loss_mask": source.has_context,
        "documents": source.documents(),
        "vocab_size": source.vocab_size,
        "end_of_text": source.end_of_text,
    }
    if source.truncation is not None:
        fields["cut"] = dataclasses.asdict(source.truncation)
    return fields
