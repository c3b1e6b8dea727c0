"""Writes the prompts of the SmolLM2 recipe from JSON Lines of public data sets.

    python experiments/smollm2/prompts.py --data=FOLDER --output=runs/smollm2/prompts

FOLDER contains `gsm8k/{train,test}.jsonl.gz`, `squad/train.jsonl.gz`,
`cnn_dailymail/{train,validation}.jsonl.gz`, `samsum/test.jsonl.gz` and
`spec_bench/test.jsonl.gz` with the field names of TensorFlow Datasets. Training prompts
are drawn from the first three data sets only, evaluation prompts from test splits and
Spec-Bench.
"""

import gzip
import json
import pathlib
import random
from collections.abc import Iterable
from typing import Any

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.storage import files
from bpd_jax.studies.tasks import SPEC_BENCH

DATA = cli.DEFINE_path("data", None, "Folder of JSON Lines.")
OUTPUT = cli.DEFINE_path("output", None, "Folder to write train/ and heldout/ to.")

SEED = 0
_HELD_OUT = 12  # prompts of each category
# Training prompts of each kind, and the maximum length of a text in characters: a long
# prompt costs more than a short one, and is of no more use for training.
_GSM8K, _SQUAD, _SQUAD_QUESTIONS, _CNN = 250, 100, 150, 110
_LONGEST_CONTEXT, _LONGEST_ARTICLE = 1400, 1500


def main() -> None:
    """Draws prompts from the data sets and writes them."""
    output = pathlib.Path(cli.required("output"))
    draw = random.Random(SEED)
    squad = read("squad", "train")
    articles = read("cnn_dailymail", "train") + read("cnn_dailymail", "validation")
    train = [
        *(record["question"] for record in draw.sample(read("gsm8k", "train"), _GSM8K)),
        *(
            f"{record['context'][:_LONGEST_CONTEXT]}\n\n{record['question'].strip()}"
            for record in draw.sample(squad, _SQUAD)
        ),
        *(r["question"].strip() for r in draw.sample(squad, _SQUAD_QUESTIONS)),
        *(
            f"Summarize: {record['article'][:_LONGEST_ARTICLE]}"
            for record in draw.sample(articles, _CNN)
        ),
    ]
    write(output / "train.jsonl", train)
    categories: dict[str, list[str]] = {
        "gsm8k": [record["question"] for record in read("gsm8k", "test")],
        "samsum": [
            f"Here is a dialogue: {record['dialogue']}\nWrite a short summary!"
            for record in read("samsum", "test")
        ],
    }
    for record in read("spec_bench", "test"):
        # The eight kinds of MT-Bench questions are one of Spec-Bench's six categories.
        name = record["category"]
        name = name if name in SPEC_BENCH else "mt_bench"
        categories.setdefault(name, []).append(record["turns"][0])
    for name, texts in categories.items():
        chosen = draw.sample(texts, min(_HELD_OUT, len(texts)))
        write(output / "heldout" / f"{name}.jsonl", chosen)


def read(name: str, split: str) -> list[dict[str, Any]]:
    """All records of a split."""
    path = pathlib.Path(cli.required("data")) / name / f"{split}.jsonl.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            return [json.loads(line) for line in stream]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}.") from error


def write(path: pathlib.Path, prompts: Iterable[str]) -> None:
    """Writes prompts as JSON Lines."""
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    files.write_text(path, "".join(lines))
    print(f"{len(lines)} prompts: {path}")


if __name__ == "__main__":
    cli.run(main)
