"""Later turns of conversations (MT-Bench): prompts with the model's answers."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from bpd_jax.decoding.loaded_model import LoadedModel
from bpd_jax.studies.tasks import StudyExample


def later_turns(
    examples: Sequence[StudyExample],
    answer: Callable[[list[np.ndarray]], list[str]],
    loaded: LoadedModel,
    *,
    turns: int,
    longest: int,
) -> list[StudyExample]:
    """Examples of the later turns of conversations, after the model's answers.

    Args:
      examples: first turns.
      answer: the model's answers to prompts.
      loaded: the model.
      turns: of a conversation, including the first.
      longest: tokens of a prompt; a conversation ends before a longer prompt.

    Raises:
      UserError: there are later turns, and the model has no chat template.
    """
    found: list[StudyExample] = []
    latest = [
        (example, [{"role": "user", "content": example.prompt}]) for example in examples
    ]
    for turn in range(turns - 1):
        latest = [pair for pair in latest if len(pair[0].follow_ups) > turn]
        if not latest:
            break
        answers = answer([example.input_ids for example, _ in latest])
        going = []
        for (example, messages), text in zip(latest, answers, strict=True):
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
                index=len(examples) + len(found),
                prompt="\n\n".join(message["content"] for message in conversation),
                input_ids=ids,
                references=(),
            )
            found.append(later)
            going.append((later, conversation))
        latest = going
    return found
