"""Scores of decoded texts, and the texts and calls that the explorer shows."""

from collections.abc import Callable

import numpy as np

from bpd_jax.decoding.generate import Generation
from bpd_jax.evaluation.metrics import metric_of
from bpd_jax.evaluation.scoring import passage_scores, split_last_word
from bpd_jax.studies.measure_drafts import ExampleText, replay
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import (
    REPORT,
    Call,
    ExplorerRecord,
    QualityRecord,
    Trace,
)
from bpd_jax.studies.tasks import LAMBADA, plain_text


def quality_records(context: StudyContext, task: str) -> list[QualityRecord]:
    """Scores the decoded texts of a task by its metric.

    The passages of LAMBADA are not decoded but scored by teacher forcing; their last
    words are the references.

    Returns:
      One record for each passage, with an empty `prediction`, or for each example that
      has references; none for a task without a metric.
    """
    loaded, examples = context.loaded(task), context.examples(task)
    metric = metric_of(task)
    if task == LAMBADA:
        passages = [example.prompt for example in examples]
        scores = passage_scores(
            loaded.model,
            loaded.tokenizer.encode,
            passages,
            begin_of_text=loaded.begin_of_text,
            batch_size=context.config.batch_size,
        )
        return [
            QualityRecord(
                task, example.index, example.part, "", [split_last_word(passage)[1]], s
            )
            for example, passage, s in zip(examples, passages, scores, strict=True)
        ]
    if metric is None:
        return []
    records = []
    for example, decoded in zip(examples, context.texts(task), strict=True):
        if references := list(example.references):
            text = plain_text(loaded, decoded.output_ids)
            scored = metric(text, references)
            records.append(
                QualityRecord(
                    task, example.index, example.part, text, references, scored
                )
            )
    return records


# Recorded candidates of each head, and characters of a prompt that are shown.
_CANDIDATES, _PROMPT = 6, 1200


def explorer_records(context: StudyContext, task: str) -> list[ExplorerRecord]:
    """The first reported examples of a task, with all contenders' drafts along them."""
    examples: dict[int, ExampleText] = {}
    by_contender: dict[int, dict[str, Generation]] = {}
    for name in context.config.contenders:
        for group, generations in replay(
            context, name, [task], every_position=False, parts=[REPORT]
        ):
            for example, generation in zip(group, generations, strict=True):
                index = example.example.index
                examples[index] = example
                by_contender.setdefault(index, {})[name] = generation
    return [
        _record(context, examples[index], by_contender[index])
        for index in sorted(examples)[: context.config.shown]
    ]


def _record(
    context: StudyContext, example: ExampleText, by_contender: dict[str, Generation]
) -> ExplorerRecord:
    # Tokens are numbered in the order of their first use.
    numbers: dict[int, int] = {}

    def numbered(tokens: np.ndarray) -> list[int]:
        return [numbers.setdefault(int(token), len(numbers)) for token in tokens]

    prompt = example.example.prompt
    if len(prompt) > _PROMPT:
        prompt = f"{prompt[: _PROMPT // 2]} […] {prompt[-(_PROMPT // 2) :]}"
    piece = context.loaded(example.task).tokenizer.piece
    text = example.text.predicted_by(context.config.source)
    log_probs = text.log_probs[..., :_CANDIDATES].astype(float)
    return ExplorerRecord(
        task=example.task,
        example=example.example.index,
        prompt=prompt,
        output=numbered(text.output_ids),
        candidates=[
            [numbered(head) for head in block]
            for block in text.candidates[..., :_CANDIDATES]
        ],
        log_probs=np.round(log_probs, 2).tolist(),
        traces=[
            Trace(name, context.label(name), _calls(generation, numbered))
            for name, generation in by_contender.items()
        ],
        # Evaluated last: the other fields number the tokens.
        pieces=[*map(piece, numbers)],
    )


def _calls(
    generation: Generation, numbered: Callable[[np.ndarray], list[int]]
) -> list[Call]:
    starts = np.cumsum([0, *generation.accepted[:-1]])
    return [
        Call(
            at=int(start),
            draft=numbered(draft[draft >= 0]),
            winner=numbered(winner[winner >= 0]),
            accepted=int(accepted),
            rank=int(rank),
        )
        for start, draft, winner, accepted, rank in zip(
            starts,
            generation.proposed,
            generation.drafts,
            generation.accepted,
            generation.ranks,
            strict=True,
        )
    ]
