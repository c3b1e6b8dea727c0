"""Rows of documents, examples and generated texts, before they are stored.

Documents of text files and generated texts need only numpy and a tokenizer; the
examples of data sets are read through seqio.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.data.corpora import split_documents, text_batches
from bpd_jax.data.example_task import SEPARATOR, DataTask, ExampleTask
from bpd_jax.data.generations import open_generations
from bpd_jax.data.packing import (
    Truncation,
    cut_documents,
    cut_texts,
    end_token,
    join_examples,
    pack,
    pad,
    split_texts,
)
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
    """
    if isinstance(task, ExampleTask):
        return _example_rows(task, split, length, vocabulary, shard, cache_dir)
    if cache_dir is not None:
        raise UserError(
            f"seqio's cache holds data sets, not the corpus {task.corpus}: leave "
            "--cache_dir out."
        )
    if task.corpus == GENERATIONS:
        return _generated_rows(task, split, length, vocabulary, shard)
    return _text_rows(task, split, length, vocabulary, shard)


def _text_rows(
    task: TextTask, split: str, length: int, vocabulary: Tokenizer, shard: Shard
) -> RowSource:
    """The documents of a corpus, each between two end-of-text tokens."""
    num_read = 0
    end = vocabulary.end_of_text

    def framed() -> Iterator[np.ndarray]:
        nonlocal num_read
        documents = split_documents(task, split, label=f"rows {split}")
        among = itertools.islice(documents, shard.index, None, shard.count)
        for batch in text_batches(document.text for document in among):
            for ids in vocabulary.encode_batch(batch):
                num_read += 1
                yield np.array([end, *ids, end], np.int32)

    return RowSource(
        rows=_whole_rows(pack(cut_documents(framed(), length), length)),
        documents=lambda: num_read,
        vocab_size=vocabulary.vocab_size,
        end_of_text=end,
        has_context=False,
    )


def _whole_rows(rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[PackedRow]:
    """Rows of which every token is in the loss."""
    for tokens, segment_ids in rows:
        yield PackedRow(tokens, segment_ids, segment_ids != 0)


def _example_rows(
    task: ExampleTask,
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
        seqio_task = seqio_tasks.get_task(task)
        dataset = seqio_task.get_dataset(split=split, shuffle=False, shard_info=part)
        examples = seqio_tasks.examples(dataset, seqio_task.source)
        total = seqio_task.source.num_input_examples(split)
    bar = progress.bar(
        examples,
        label=f"rows {split}",
        total=None if total is None else round(total / shard.count),
        unit=" examples",
    )
    num_read = 0

    def read_examples() -> Iterator[Mapping[str, np.ndarray]]:
        nonlocal num_read
        for example in bar:
            num_read += 1
            yield example

    rows: Iterator[PackedRow]
    fill = pack if task.packed else pad
    if task.has_inputs:
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
        rows = _whole_rows(fill(cut_documents(documents, length), length))
    return RowSource(
        rows=rows,
        documents=lambda: num_read,
        vocab_size=vocabulary.vocab_size,
        end_of_text=vocabulary.end_of_text,
        has_context=task.has_inputs,
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
