"""Times decoding; the contenders alternate on the same prompts (Table E)."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.compiled import forget_compiled
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import BATCHED, SPECULATIVE, DecodeOptions
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import REPORT, TimingRecord
from bpd_jax.studies.tasks import StudyExample

Key = tuple[str, str, float, int]
"""The unit of measurement: task, contender, temperature, round."""

VARIANTS: dict[str, dict[str, Any]] = {
    "speculative": {"acceptance": SPECULATIVE},
    "batched": {"verification": BATCHED},
}
"""Other ways of decoding with a contender, and their options."""


def with_variant(contender: str, variant: str | None) -> str:
    """The name in records of a contender that decodes in another way.

    >>> with_variant("bpd", "speculative"), with_variant("bpd", None)
    ('bpd (speculative)', 'bpd')
    """
    return contender if variant is None else f"{contender} ({variant})"


def variant_of(name: str) -> tuple[str, str | None]:
    """The contender and the variant of a name in records.

    >>> variant_of("bpd (speculative)"), variant_of("bpd")
    (('bpd', 'speculative'), ('bpd', None))
    """
    for variant in VARIANTS:
        contender = name.removesuffix(f" ({variant})")
        if contender != name:
            return contender, variant
    return name, None


def timing_records(
    context: StudyContext, done: Collection[tuple[str, str, float, int, int]] = ()
) -> Iterator[list[TimingRecord]]:
    """Decodes every prompt with every contender, one prompt at a time.

    Within a round all contenders decode all prompts of a task, so that changes in the
    load of the machine affect all contenders; every round has its own seed. Plain
    decoding comes first. The prompts of a task are padded to one length, so that all
    use the code that an untimed first call compiles. With exact acceptance, the noise
    of sampling depends only on prompt and position, so that all contenders produce the
    same text.

    Args:
      context: settings, model, prompts and contenders.
      done: `TimingRecord.key` of the records that a resumed run already has; a
        contender that lacks a prompt in a round is measured again.

    Yields:
      The records of one contender in one round, one per prompt.
    """
    config = context.config
    contenders = list(dict.fromkeys([GREEDY.name, *config.contenders]))
    examples = {
        task: [e for e in context.examples(task) if e.part == REPORT][
            : config.examples * config.turns
        ]
        for task in config.tasks
    }
    keys = [
        (task, name, float(temperature), turn)
        # In this order an interrupted run has complete temperatures and rounds.
        for temperature in config.temperatures
        for turn in range(config.rounds)
        for task in config.tasks
        for name in [
            *contenders,
            *(with_variant(each, "batched") for each in config.batched),
            *(
                with_variant(each, "speculative")
                for each in (config.speculative if temperature > 0 else ())
            ),
        ]
    ]
    missing = [
        key
        for key in keys
        if any((*key, example.index) not in done for example in examples[key[0]])
    ]
    for task, name, temperature, _ in dict.fromkeys((*key[:3], 0) for key in missing):
        decoder, request = _request(
            context, (task, name, temperature, 0), examples[task]
        )
        decoder.check(*request)
    finished = len(keys) - len(missing)
    with progress.bar(
        label="timing", unit=" runs", total=len(keys), initial=finished
    ) as bar:
        # Texts of plain decoding for one task, temperature and round.
        texts: dict[Key, list[Generation]] = {}
        for key in missing:
            task, name, temperature, turn = key
            bar.set_postfix_str(f"{task}, {name}", refresh=False)
            plain = (task, GREEDY.name, temperature, turn)
            if plain not in texts:
                # The next prompts have another length, so that compiled code cannot be
                # reused.
                forget_compiled()
                decoder, request = _request(context, plain, examples[task])
                texts = {plain: decoder.decode(*request)}
            generations = texts[plain]
            if key != plain:
                decoder, request = _request(context, key, examples[task])
                generations = decoder.decode(*request, reference=texts[plain])
            yield [
                TimingRecord(
                    task=task,
                    example=example.index,
                    contender=name,
                    temperature=temperature,
                    round=turn,
                    tokens=len(generation.output_ids),
                    calls=generation.serial_calls,
                    seconds=generation.seconds,
                    identical=None
                    if variant_of(name)[1] == "speculative"
                    else np.array_equal(generation.output_ids, expected.output_ids),
                )
                for example, generation, expected in zip(
                    examples[task], generations, texts[plain], strict=True
                )
            ]
            bar.update(1)


def _request(
    context: StudyContext, key: Key, examples: Sequence[StudyExample]
) -> tuple[Decoder, tuple[Method, list[np.ndarray], DecodeOptions]]:
    """A decoder, and the arguments of its `check` and `decode`."""
    task, name, temperature, turn = key
    contender, variant = variant_of(name)
    decoder, method = context.contender(contender, task)
    options = context.options(task)
    options = dataclasses.replace(
        options,
        temperature=temperature,
        seed=options.seed + turn,
        batch_size=1,
        **VARIANTS.get(variant or "", {}),
    )
    return decoder, (method, [example.input_ids for example in examples], options)
