"""Scores decoded texts against their references."""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from bpd_jax.evaluation.metrics.lambada import (
    Encode,
    passage_scores,
    split_last_word,
)
from bpd_jax.evaluation.metrics.task_metrics import metric_of
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.studies.study_records import QualityRecord
from bpd_jax.studies.tasks import StudyExample
from bpd_jax.typing import Params


def plain_text(
    output: Sequence[int] | np.ndarray,
    decode: Callable[[Iterable[int]], str],
    end_tokens: Collection[int],
) -> str:
    """The text of decoded tokens before the end of text, without surrounding spaces."""
    tokens = itertools.takewhile(lambda token: token not in end_tokens, output)
    return decode(map(int, tokens)).strip()


def quality_records(
    task: str,
    examples: Sequence[StudyExample],
    outputs: Sequence[Sequence[int] | np.ndarray],
    decode: Callable[[Iterable[int]], str],
    end_tokens: Collection[int],
) -> list[QualityRecord]:
    """Scores decoded texts by the metric of their task.

    Args:
      task: name of the task.
      examples: prompts with their references.
      outputs: decoded tokens of each example.
      decode: tokenizer function from tokens to text.
      end_tokens: tokens that end a text, as `LoadedModel.end_tokens`.

    Returns:
      One record for each example that has references; none for a task without a metric.

    Raises:
      UserError: a package that the metric needs is not installed.
    """
    metric = metric_of(task)
    if metric is None:
        return []
    records = []
    for example, output in zip(examples, outputs, strict=True):
        if example.references:
            text = plain_text(output, decode, end_tokens)
            references = list(example.references)
            scores = metric(text, references)
            records.append(
                QualityRecord(
                    task, example.index, example.part, text, references, scores
                )
            )
    return records


def passage_records(
    task: str,
    examples: Sequence[StudyExample],
    passages: Sequence[str],
    model: ModelFunctions,
    params: Params,
    encode: Encode,
    *,
    begin_of_text: int | None = None,
    batch_size: int = 1,
) -> list[QualityRecord]:
    """Scores passages as `passage_scores` does; their last words are the references.

    Args:
      task: name of the task, `lambada`.
      examples: the examples of the passages.
      passages: the complete passages, including their last words.
      model, params, encode, begin_of_text, batch_size: as in `passage_scores`.

    Returns:
      One record for each passage, with an empty `prediction`.
    """
    scores = passage_scores(
        model,
        params,
        encode,
        passages,
        begin_of_text=begin_of_text,
        batch_size=batch_size,
    )
    return [
        QualityRecord(
            task, example.index, example.part, "", [split_last_word(passage)[1]], score
        )
        for example, passage, score in zip(examples, passages, scores, strict=True)
    ]
