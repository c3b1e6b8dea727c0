"""Creates the records of drafts and of the oracle by replaying the texts."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.recording import RecordedText, padded_sizes
from bpd_jax.decoding.replay import replay_of
from bpd_jax.evaluation.draft_statistics import oracle_calls, repeats
from bpd_jax.studies.study_config import BPD, parse_contender
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import (
    ENTROPY_BIN,
    ENTROPY_STEP,
    PARTS,
    DraftRecord,
    EngineRecord,
    EntropyRecord,
    OracleRecord,
    call_positions,
    to_digits,
)
from bpd_jax.studies.tasks import StudyExample

# Number of texts that are replayed together; a contender is compiled for this number.
_GROUP = 128


class ExampleText(NamedTuple):
    """An example with its decoded text."""

    task: str
    example: StudyExample
    text: RecordedText


def draft_records(
    context: StudyContext,
    contender: str,
    tasks: Sequence[str],
    parts: Collection[str] = PARTS,
) -> Iterator[list[DraftRecord]]:
    """Yields groups of records of a contender's drafts along the texts of tasks."""
    source = context.config.source
    for group, generations in replay(
        context, contender, tasks, every_position=True, parts=parts
    ):
        yield [
            _draft_record(example, generation, contender, source)
            for example, generation in zip(group, generations, strict=True)
        ]


def replay(
    context: StudyContext,
    contender: str,
    tasks: Sequence[str],
    *,
    every_position: bool,
    parts: Collection[str] = PARTS,
) -> Iterator[tuple[list[ExampleText], list[Generation]]]:
    """Replays a contender on texts of some tasks.

    If the contender uses the same models for all tasks, their texts are replayed
    together. All groups have the same size, so that each contender is compiled once.

    Args:
      context: model, examples and texts.
      contender: name of the contender.
      tasks: names of the tasks.
      every_position: whether to draft at every position of a text, or only at those
        where decoding calls the model.
      parts: parts of the examples: `TUNE`, `REPORT` or both.

    Yields:
      A group of examples, and the replayed generation of each.
    """
    examples = [
        ExampleText(task, example, text)
        for task in tasks
        for example, text in zip(
            context.examples(task), context.texts(task), strict=True
        )
        if len(text.output_ids) and example.part in parts
    ]
    if not examples:
        return
    by_task = context.depends_on_task(contender)
    sizes = padded_sizes([example.text for example in examples])
    padded = sizes[0] - sizes[1]
    for task in tasks if by_task else tasks[:1]:
        selected = [each for each in examples if not by_task or each.task == task]
        if not selected:
            continue
        decoder, method = context.contender(contender, task)
        rows = min(_GROUP, len(selected))
        for begin in range(0, len(selected), rows):
            group = selected[begin : begin + rows]
            # The last group is padded with other texts to the same shape.
            texts = [example.text for example in (group + selected)[:rows]]
            recorded = replay_of(
                decoder,
                texts,
                context.options(task),
                sizes=sizes,
                padded=padded,
            )
            replayer = recorded.decoder(width=decoder.width, alpha=decoder.alpha)
            generations = recorded.decode(
                method, replayer, every_position=every_position
            )
            yield group, generations[: len(group)]


def _draft_record(
    example: ExampleText, generation: Generation, contender: str, source: str
) -> DraftRecord:
    """Summarises a generation with drafts at every position."""
    drafts = generation.proposed
    equal, longest = repeats(drafts)
    calls = call_positions(generation.accepted)
    entropies = np.zeros((1, 0))
    if contender == BPD:
        entropies = example.text.predicted_by(source).entropies
    return DraftRecord(
        task=example.task,
        example=example.example.index,
        part=example.example.part,
        contender=contender,
        accepted=to_digits(generation.accepted),
        length=to_digits((drafts >= 0).sum(1)),
        equal=to_digits(equal),
        longest=to_digits(longest),
        nodes=int(generation.nodes[calls].sum()),
        head_entropy=[round(float(value), 5) for value in entropies.mean(0)],
        entropy_counts=[
            # Rounding can make an entropy of 0 slightly negative.
            to_digits(np.bincount(np.maximum(bins, 0)))
            for bins in (entropies.T / ENTROPY_BIN).astype(int)
        ],
    )


def engine_records(
    context: StudyContext,
    contender: str,
    tasks: Sequence[str],
    parts: Collection[str] = PARTS,
) -> Iterator[list[EngineRecord]]:
    """Yields groups of records of a contender with `engine=fst`; see `EngineRecord`."""
    parsed = parse_contender(contender)
    exact = parsed.method.without("engine").name
    if parsed.assets is not None:
        exact += f"@{parsed.assets}"
    both = (
        replay(context, name, tasks, every_position=True, parts=parts)
        for name in (contender, exact)
    )
    for (group, generations), (_, exact_ones) in zip(*both, strict=True):
        yield [
            EngineRecord(
                task=example.task,
                example=example.example.index,
                part=example.example.part,
                contender=contender,
                same=to_digits(_same(generation, other).astype(int)),
                milliseconds=_milliseconds(generation),
                exact_milliseconds=_milliseconds(other),
            )
            for example, generation, other in zip(
                group, generations, exact_ones, strict=True
            )
        ]


def _same(one: Generation, other: Generation) -> np.ndarray:
    """Whether the drafts of each call agree in what a generation records, `[calls]`."""
    best: np.ndarray = (one.proposed == other.proposed).all(1)
    return best & (one.nodes == other.nodes) & (one.accepted == other.accepted)


def _milliseconds(generation: Generation) -> float:
    return round(1e3 * generation.seconds / len(generation.accepted), 4)


def entropy_records(context: StudyContext, task: str) -> list[EntropyRecord]:
    """Records of the entropies of the heads that draft, for a task's texts."""
    records = []
    for example, text in zip(context.examples(task), context.texts(task), strict=True):
        entropies = text.predicted_by(context.config.source).entropies[:, 1:]
        steps = np.rint(np.maximum(entropies, 0) / ENTROPY_STEP).astype(int)
        digits = [*map(to_digits, steps.T)]
        records.append(EntropyRecord(task, example.index, example.part, digits))
    return records


def oracle_records(context: StudyContext, task: str) -> list[OracleRecord]:
    """Records of the oracle for every width and number of heads, for a task's texts."""
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
