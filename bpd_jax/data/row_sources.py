"""Sources of rows: documents, examples, generated texts."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from bpd_jax import progress
from bpd_jax.data.example_pieces import Cut, cut_documents, join_examples
from bpd_jax.data.example_task import SEPARATOR, DataTask, ExampleTask
from bpd_jax.data.generated_pieces import cut_texts, end_token, split_texts
from bpd_jax.data.generations import open_generations
from bpd_jax.data.packing import pack, pad
from bpd_jax.data.text_task import GENERATIONS, TextTask
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.errors import UserError


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
    """The rows of a split, and facts about them.

    Attributes:
      rows: an iterator, which can be read once.
      documents: number of documents or examples read so far.
      vocab_size: V.
      end_of_text: the token that ends a document.
      has_context: whether some tokens are not in the loss.
      cut: counts of what did not fit so far; None if nothing can be lost.
    """

    rows: Iterator[PackedRow]
    documents: Callable[[], int]
    vocab_size: int
    end_of_text: int
    has_context: bool
    cut: Cut | None = None


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
    # seqio and TensorFlow take seconds to import, and existing rows do not need them.
    from bpd_jax.data import seqio_cache, seqio_tasks

    if cache_dir is not None:
        seqio_cache.use_cache(task, cache_dir)
    seqio_task = seqio_tasks.get_task(task, label=f"rows {split}")
    dataset = seqio_task.get_dataset(
        split=split,
        shuffle=False,
        use_cached=cache_dir is not None,
        shard_info=None
        if shard.count == 1
        else seqio_tasks.seqio.ShardInfo(shard.index, shard.count),
    )
    read = 0

    def count() -> Iterator[Mapping[str, np.ndarray]]:
        nonlocal read
        total = None
        if isinstance(task, ExampleTask) and cache_dir is None:
            total = seqio_task.source.num_input_examples(split)
        for example in progress.bar(
            seqio_tasks.examples(dataset, seqio_task.source),
            label=f"rows {split}",
            total=None if total is None else round(total / shard.count),
            unit=" examples",
            # The source shows a progress bar over its text.
            disable=isinstance(task, TextTask) and cache_dir is None,
        ):
            read += 1
            yield example

    rows: Iterator[PackedRow]
    has_inputs = isinstance(task, ExampleTask) and task.has_inputs
    fill = pad if isinstance(task, ExampleTask) and not task.packed else pack
    if has_inputs:
        cut = Cut()
        separator = len(vocabulary.encode(SEPARATOR))
        pieces = join_examples(count(), length, separator, cut)
        rows = (
            PackedRow(row[:, 0], segment_ids, row[:, 1])
            for row, segment_ids in fill(pieces, length)
        )
    else:
        cut = None
        documents = (example["targets"] for example in count())
        rows = (
            PackedRow(row, segment_ids, segment_ids != 0)
            for row, segment_ids in fill(cut_documents(documents, length), length)
        )
    return RowSource(
        rows=rows,
        documents=lambda: read,
        vocab_size=vocabulary.vocab_size,
        end_of_text=vocabulary.end_of_text,
        has_context=has_inputs,
        cut=cut,
    )


def _generated_rows(
    task: TextTask, split: str, length: int, vocabulary: Tokenizer, shard: Shard
) -> RowSource:
    texts = open_generations(task.text_files or "")
    if vocabulary.vocab_size > texts.vocab_size:
        raise UserError(
            f"the vocabulary {task.vocabulary} has {vocabulary.vocab_size} tokens and "
            f"the model that wrote {texts.folder} {texts.vocab_size}: give the "
            "tokenizer.json of that model."
        )
    chosen = split_texts(texts, split, task.validation_fraction)
    chosen = chosen[shard.index :: shard.count]
    bar = progress.bar(chosen, label=f"rows {split}", unit=" texts")
    end = end_token(texts)
    return RowSource(
        rows=(
            PackedRow(row[:, 0], segment_ids, row[:, 1])
            for row, segment_ids in pack(cut_texts(texts, bar, length), length)
        ),
        documents=lambda: len(chosen),
        # The model may have more tokens than its tokenizer uses.
        vocab_size=texts.vocab_size,
        end_of_text=vocabulary.end_of_text if end is None else end,
        has_context=True,
    )


def describe_source(source: RowSource) -> dict[str, Any]:
    """The fields of `rows.json` for a source that has been read."""
    about: dict[str, Any] = {
        "loss_mask": source.has_context,
        "documents": source.documents(),
        "vocab_size": source.vocab_size,
        "end_of_text": source.end_of_text,
    }
    if source.cut is not None:
        about["cut"] = dataclasses.asdict(source.cut)
    return about
