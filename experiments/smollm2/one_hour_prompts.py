"""Writes prompts to train a drafter of one hour on, and held-out ones to measure it on.

    python experiments/smollm2/one_hour_prompts.py --data=FOLDER \\
        --output=runs/one_hour/prompts

FOLDER contains JSON Lines with the field names of TensorFlow Datasets. Writes

    passages.jsonl        beginnings of texts of a corpus, for models without a template
    instructions.jsonl    general instructions

and 24 held-out prompts of each kind, `heldout_passages.jsonl` and
`heldout_instructions.jsonl`, and of another one, `heldout_questions.jsonl`: 12
questions of GSM8K and 12 requests to translate. No training prompt equals a text of an
evaluation file, or shares a run of 13 words with one.
"""

import pathlib
import random

from prompts import SEED, read, write
from training_prompts import (
    MeasuredTexts,
    PromptCandidate,
    documents,
    measured_texts,
    passage,
)

from bpd_jax.base import cli

_HELD_OUT, _PASSAGES = 24, 6000
# The longest passage in characters; most are shorter.
_LONGEST = 500


def main() -> None:
    """Draws prompts from the data sets, filters them and writes them."""
    output = pathlib.Path(cli.required("output"))
    draw = random.Random(SEED)
    instructions = [record["prompt"] for record in read("instructions", "train")]
    draw.shuffle(instructions)
    questions = [record["question"] for record in read("gsm8k", "test")]
    translations = [
        record["turns"][0]
        for record in read("spec_bench", "test")
        if record["category"] == "translation"
    ]
    held_out = {
        "passages": beginnings(read("corpus", "heldout"), draw)[:_HELD_OUT],
        "instructions": instructions[:_HELD_OUT],
        "questions": [
            *draw.sample(questions, _HELD_OUT // 2),
            *draw.sample(translations, _HELD_OUT // 2),
        ],
    }
    measured = MeasuredTexts([*measured_texts(), *instructions[:_HELD_OUT]])
    train = {
        "passages": beginnings(list(documents()), draw)[:_PASSAGES],
        "instructions": instructions[_HELD_OUT:],
    }
    for name, texts in held_out.items():
        write(output / f"heldout_{name}.jsonl", texts)
    for name, texts in train.items():
        candidates = [PromptCandidate(name, text, ()) for text in dict.fromkeys(texts)]
        kept = [one.text for one in candidates if not measured.shares(one)]
        write(output / f"{name}.jsonl", kept)


def beginnings(records: list[dict], draw: random.Random) -> list[str]:
    """A passage of each document, without its last word, in random order."""
    chosen = draw.sample(records, len(records))
    texts = [passage(record["text"], draw)[:_LONGEST] for record in chosen]
    return [text.rsplit(" ", 1)[0] for text in texts if " " in text]


if __name__ == "__main__":
    cli.run(main)
