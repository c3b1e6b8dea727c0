"""Later turns of conversations (MT-Bench), whose prompts contain earlier answers."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.studies.tasks import StudyExample


def later_turns(
    examples: Sequence[StudyExample],
    answer: Callable[[list[np.ndarray]], list[str]],
    loaded: LanguageModel,
    *,
    turns: int,
    longest: int,
) -> list[StudyExample]:
    """Examples of the later turns of conversations, after the model's answers.

    Args:
      examples: first turns.
      answer: returns the model's answers to prompts.
      turns: number of turns, including the first.
      longest: maximum number of tokens of a prompt; a conversation ends before a longer
        one.
    """
    later_examples: list[StudyExample] = []
    active = [
        (example, [{"role": "user", "content": example.prompt}]) for example in examples
    ]
    for turn in range(turns - 1):
        active = [pair for pair in active if len(pair[0].follow_ups) > turn]
        if not active:
            break
        answers = answer([example.input_ids for example, _ in active])
        continued = []
        for (example, messages), text in zip(active, answers, strict=True):
            conversation = [
                *messages,
                {"role": "assistant", "content": text},
                {"role": "user", "content": example.follow_ups[turn]},
            ]
            ids = loaded.encode_prompt(conversation)
            if len(ids) > longest:
                continue
            later = dataclasses.replace(
                example,
                index=len(examples) + len(later_examples),
                prompt="\n\n".join(message["content"] for message in conversation),
                input_ids=ids,
                references=(),
            )
            later_examples.append(later)
            continued.append((later, conversation))
        active = continued
    return later_examples
