"""Makes the records of drafts and of the oracle by replaying the texts."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.recording import RecordedText, padded_sizes
from bpd_jax.decoding.replay import replay_of
from bpd_jax.evaluation.oracle_grid import oracle_calls
from bpd_jax.studies.study_config import BPD
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import (
    DraftRecord,
    OracleRecord,
    call_positions,
    to_digits,
)
from bpd_jax.studies.tasks import StudyExample

# Number of texts that are replayed together; each contender is compiled once for it.
_GROUP = 128


class ExampleText(NamedTuple):
    """An example with its text."""

    task: str
    example: StudyExample
    text: RecordedText


def draft_records(
    context: StudyContext, contender: str, tasks: Sequence[str]
) -> Iterator[list[DraftRecord]]:
    """Records of a contender's drafts along the texts of some tasks, in groups."""
    source = context.config.source
    for group, found in replay(context, contender, tasks, every_position=True):
        yield [
            _draft_record(place, generation, contender, source)
            for place, generation in zip(group, found, strict=True)
        ]


def replay(
    context: StudyContext,
    contender: str,
    tasks: Sequence[str],
    *,
    every_position: bool,
    part: str | None = None,
) -> Iterator[tuple[list[ExampleText], list[Generation]]]:
    """Replays a contender on texts of some tasks.

    Texts of all tasks go together if the contender's models are the same for all, and
    in groups of one size, so that each contender is compiled once.

    Args:
      context: model, examples, texts.
      contender: its name.
      tasks: their names.
      every_position: whether drafts are made at every position of a text, or only at
        those where decoding calls the model.
      part: of the examples; None for all.
    """
    places = [
        ExampleText(task, example, text)
        for task in tasks
        for example, text in zip(
            context.examples(task), context.texts(task), strict=True
        )
        if len(text.output_ids) and part in (None, example.part)
    ]
    if not places:
        return
    apart = context.depends_on_task(contender)
    sizes = padded_sizes([place.text for place in places])
    padded = sizes[0] - sizes[1]
    for task in tasks if apart else tasks[:1]:
        mine = [place for place in places if not apart or place.task == task]
        if not mine:
            continue
        decoder, method = context.contender(contender, task)
        rows = min(_GROUP, len(mine))
        for begin in range(0, len(mine), rows):
            group = mine[begin : begin + rows]
            # The last group is filled up, to be of the same shape.
            texts = [place.text for place in (group + mine)[:rows]]
            kept = replay_of(
                decoder,
                texts,
                context.options(task),
                keep_hidden=method.needs_hidden,
                sizes=sizes,
                padded=padded,
            )
            replayer = kept.decoder(width=decoder.width, alpha=decoder.alpha)
            found = kept.decode(method, replayer, every_position=every_position)
            yield group, found[: len(group)]


def _draft_record(
    place: ExampleText, every: Generation, contender: str, source: str
) -> DraftRecord:
    """From drafts at every position."""
    drafts = every.proposed
    pairs = (drafts[:, 1:] >= 0) & (drafts[:, :-1] >= 0)
    equal = pairs & (drafts[:, 1:] == drafts[:, :-1])
    run = longest = np.ones(len(drafts), int)
    for column in equal.T:
        run = np.where(column, run + 1, 1)
        longest = np.maximum(longest, run)
    calls = call_positions(every.accepted)
    entropies = np.zeros(0)
    if contender == BPD:
        entropies = place.text.predicted_by(source).entropies.mean(0)
    return DraftRecord(
        task=place.task,
        example=place.example.index,
        part=place.example.part,
        contender=contender,
        accepted=to_digits(every.accepted),
        length=to_digits((drafts >= 0).sum(1)),
        equal=to_digits(equal.sum(1)),
        longest=to_digits(longest),
        nodes=int(every.nodes[calls].sum()),
        head_entropy=[round(float(value), 5) for value in entropies],
    )


def oracle_records(context: StudyContext, task: str) -> list[OracleRecord]:
    """The oracle for every width and number of heads, along the texts of a task."""
    return [
        OracleRecord(
            task,
            example.index,
            example.part,
            len(text.output_ids),
            oracle_calls(
                text.predicted_by(context.config.source).candidates, text.output_ids
            ).tolist(),
        )
        for example, text in zip(
            context.examples(task), context.texts(task), strict=True
        )
        if len(text.output_ids)
    ]
