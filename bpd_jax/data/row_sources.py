"""Rows of documents, examples and generated texts, before they are stored.

Documents of text files and generated texts need only numpy and a tokenizer; the
examples of data sets are read through seqio.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.data.corpora import split_documents, text_batches
from bpd_jax.data.example_task import SEPARATOR, DataTask, ExampleTask
from bpd_jax.data.generations import open_generations
from bpd_jax.data.packing import (
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


class RowSource(NamedTuple):
    """The rows of a split, and what `rows.json` says of them.

    Attributes:
      rows: tokens, or `[T, 2]` tokens and loss mask, and segment ids of every row, as
        from `pack`; can be read once.
      facts: `loss_mask`, whether some tokens are not in the loss; `documents`, how many
        documents or examples were read so far; `vocab_size`; `end_of_text`; and, for
        examples with inputs, `cut`, what was truncated so far (`join_examples`).
    """

    rows: Iterator[tuple[np.ndarray, np.ndarray]]
    facts: dict[str, Any]


def open_source(
    task: DataTask,
    split: str,
    length: int,
    vocabulary: Tokenizer,
    shard: Shard = WHOLE,
    cache_dir: str | None = None,
) -> RowSource:
    """Returns the rows of a split; see `row_preparation.prepare_rows`."""
    facts: dict[str, Any] = {
        "loss_mask": False,
        "documents": 0,
        "vocab_size": vocabulary.vocab_size,
        "end_of_text": vocabulary.end_of_text,
    }
    if isinstance(task, ExampleTask):
        return _example_rows(task, split, length, vocabulary, shard, cache_dir, facts)
    if cache_dir is not None:
        raise UserError(
            f"seqio's cache holds data sets, not the corpus {task.corpus}: leave "
            "--cache_dir out."
        )
    if task.corpus == GENERATIONS:
        return _generated_rows(task, split, length, shard, facts)

    def framed() -> Iterator[np.ndarray]:
        documents = split_documents(task, split, label=f"rows {split}")
        among = itertools.islice(documents, shard.index, None, shard.count)
        end = vocabulary.end_of_text
        for batch in text_batches(document.text for document in among):
            for ids in vocabulary.encode_batch(batch):
                facts["documents"] += 1
                yield np.array([end, *ids, end], np.int32)

    return RowSource(pack(cut_documents(framed(), length), length), facts)


def _example_rows(
    task: ExampleTask,
    split: str,
    length: int,
    vocabulary: Tokenizer,
    shard: Shard,
    cache_dir: str | None,
    facts: dict[str, Any],
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

    def read_examples() -> Iterator[Mapping[str, np.ndarray]]:
        for example in bar:
            facts["documents"] += 1
            yield example

    if task.has_inputs:
        facts["loss_mask"] = True
        cut = facts["cut"] = {"inputs": 0, "targets": 0, "tokens": 0}
        separator = len(vocabulary.encode(SEPARATOR))
        pieces = join_examples(read_examples(), length, separator, cut)
    else:
        documents = (example["targets"] for example in read_examples())
        pieces = cut_documents(documents, length)
    return RowSource((pack if task.packed else pad)(pieces, length), facts)


def _generated_rows(
    task: TextTask, split: str, length: int, shard: Shard, facts: dict[str, Any]
) -> RowSource:
    texts = open_generations(task.text_files or "")
    if facts["vocab_size"] > texts.vocab_size:
        raise UserError(
            f"the vocabulary {task.vocabulary} has {facts['vocab_size']} tokens and "
            f"the model that generated {texts.folder} has {texts.vocab_size}: give the "
            "tokenizer.json of that model."
        )
    indices = split_texts(texts, split, task.validation_fraction)
    indices = indices[shard.index :: shard.count]
    # A model may have more tokens than its tokenizer.
    facts |= {
        "loss_mask": True,
        "documents": len(indices),
        "vocab_size": texts.vocab_size,
    }
    if (end := end_token(texts)) is not None:
        facts["end_of_text"] = end
    bar = progress.bar(indices, label=f"rows {split}", unit=" texts")
    return RowSource(pack(cut_texts(texts, bar, length), length), facts)
