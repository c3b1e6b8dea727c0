"""Writes the training prompts of SmolLM2, excluding all evaluation data.

    python experiments/smollm2/training_prompts.py --data=FOLDER \\
        --output=runs/smollm2/prompts/equal

FOLDER contains JSON Lines of public data sets with the field names of TensorFlow
Datasets, `instructions/train.jsonl.gz` (field `prompt`), and a corpus in
`corpus/train-*.jsonl.gz` (fields `text` and `source`).

One half of the prompts are general instructions. The other half has the same number of
prompts of each of the paper's seven tasks: records of their training splits where
FOLDER has them, filled up with passages of the corpus of the same kind (for XSum, news
of the BBC; for LAMBADA, narrative text to continue). Every third of them has the
task's own prompt, the others a request in other words. A prompt is dropped if it, or a
text in it, equals a text of an evaluation file, or shares a 13-gram of words with one
(ignoring case and punctuation).

Writes `greedy.jsonl`, for every fourth prompt `sampled.jsonl`, and `plain.jsonl`,
passages to continue without a chat template (`distill --nochat`). The field `kind` is
the task, or `instructions` or `gsm8k`.
"""

import collections
import json
import pathlib
import random
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from absl import flags
from prompts import SEED, read

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.data.example_task import DATASETS
from bpd_jax.storage import files

SCALE = flags.DEFINE_float("scale", 1.0, "Factor of the number of prompts of a kind.")
SEED_OF_DRAW = flags.DEFINE_integer("seed", SEED, "Another one draws other prompts.")

# The evaluation files, and the fields of their texts.
MEASURED = {
    "spec_bench/test": ("turns", "reference"),
    "mt_bench/test": ("turns", "reference"),
    "squad/validation": ("context", "question"),
    "samsum/validation": ("dialogue", "summary"),
    "samsum/test": ("dialogue", "summary"),
    "xsum/test": ("document", "summary"),
    "multi_news/test": ("document", "summary"),
    "newsroom/sample": ("text", "summary"),
    "lambada/validation": ("passage",),
    "lambada/test": ("passage",),
    "lambada/test_cased": ("passage",),
    "cnn_dailymail/validation": ("article", "highlights"),
    "gsm8k/test": ("question", "answer"),
    "c4/sample": ("text",),
    "corpus/heldout": ("text",),
}

RUN = 13
# Number of prompts of each of the seven tasks, and of questions of GSM8K.
_TASK, _GSM8K = 1900, 1200
# Bounds of the length of a passage in characters, which is log-uniform.
_SHORTEST_TEXT, _LONGEST_TEXT = 200, 1700

# The parts of the corpus that are similar to the texts of a task.
SIMILAR = {
    "lambada": ("classic_books",),
    "cnn_dailymail": ("reuters_c50",),
    "multi_news": ("reuters_c50", "abc_and_speeches"),
    "xsum": ("bbc_2004_2005",),
    "newsroom": ("digital_gov", "18f", "abc_and_speeches"),
}

# Requests in other words than the task's own prompt; `{}` stands for the text.
REQUESTS = {
    "gsm8k": (
        "{}",
        "{}",
        "{} Explain your reasoning step by step.",
        "Solve this problem: {}",
        "Please help me with this math problem.\n\n{}",
        "{}\nGive the answer at the end.",
        "Work out the answer, one step at a time: {}",
    ),
    "squad": (
        "{context}\n\n{question}",
        "Read the text and answer the question.\n\n{context}\n\nQuestion: {question}",
        "Context: {context}\nQuestion: {question}\nAnswer:",
        "{question} Use this text: {context}",
        "Based on the following text, {question}\n\n{context}",
        "Answer in a full sentence: {question}\n\n{context}",
    ),
    "samsum": (
        "Summarize this conversation:\n\n{}",
        "{}\n\nWhat is this conversation about?",
        "Read the chat below and say in two sentences what happened.\n\n{}",
        "Summarize the dialogue.\n{}\nSummary:",
        "What do the people in this chat agree on?\n\n{}",
    ),
    "cnn_dailymail": (
        "Summarize the following article in three sentences.\n\n{}",
        "{}\n\nTL;DR:",
        "What are the main points of this news story?\n\n{}",
        "Write the highlights of this article as bullet points.\n\n{}",
    ),
    "multi_news": (
        "Summarize these reports in one text:\n\n{}",
        "{}\n\nWhat do these articles report?",
        "Here are several articles. Write one summary of all of them.\n\n{}",
        "What do the following texts have in common, and where do they differ?\n\n{}",
    ),
    "xsum": (
        "Summarize the following article in one sentence.\n\n{}",
        "{}\n\nSummarize this.",
        "What is this article about? Answer in one sentence.\n\n{}",
        "Write the first sentence of a news broadcast about this: {}",
    ),
    "newsroom": (
        "Write a headline and a short summary for this article: {}",
        "{}\n\nShort summary:",
        "Summarize this text for a reader in a hurry.\n\n{}",
        "List the key points of this text.\n\n{}",
    ),
}
# The place of the document in the task's own prompt.
DOCUMENT = {
    "samsum": "dialogue",
    "cnn_dailymail": "article",
    "multi_news": "document",
    "xsum": "document",
    "newsroom": "text",
}
# Between the articles of a record of MultiNews.
ARTICLES = "\n\n|||||\n\n"


class PromptCandidate(NamedTuple):
    """A prompt.

    Attributes:
      kind: its task, or `instructions` or `gsm8k`.
      text: all of it.
      parts: the texts of a data set that it contains.
    """

    kind: str
    text: str
    parts: tuple[str, ...]


def main() -> None:
    """Draws prompts from the data sets, filters them and writes them."""
    output = pathlib.Path(cli.required("output"))
    draw = random.Random(SEED_OF_DRAW.value)
    measured = MeasuredTexts(measured_texts())
    seen: set[str] = set()
    kept: list[PromptCandidate] = []
    counts: collections.Counter[str] = collections.Counter()
    refused = 0
    limit = {"gsm8k": _GSM8K, **dict.fromkeys(DATASETS, _TASK)}
    for candidate in candidates(draw):
        key = normalised(candidate.text)
        full = counts[candidate.kind] >= SCALE.value * limit.get(candidate.kind, 1e9)
        if key in seen or full:
            continue
        seen.add(key)
        if measured.shares(candidate):
            refused += 1
            continue
        kept.append(candidate)
        counts[candidate.kind] += 1
    draw.shuffle(kept)
    print(f"{refused} prompts share text with evaluation data and are left out.")
    print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
    plain = [candidate for candidate in kept if candidate.kind == "lambada"]
    chat = [candidate for candidate in kept if candidate.kind != "lambada"]
    count = round(len(chat) / 4)
    for name, chosen in (
        ("sampled", chat[:count]),
        ("greedy", chat[count:]),
        ("plain", plain),
    ):
        lines = [
            json.dumps({"prompt": candidate.text, "kind": candidate.kind}) + "\n"
            for candidate in chosen
        ]
        files.write_text(output / f"{name}.jsonl", "".join(lines))
        print(f"{len(lines)} prompts: {output / name}.jsonl")


def candidates(draw: random.Random) -> Iterator[PromptCandidate]:
    """Prompts of every kind, more than are needed."""

    def shuffled(records: list) -> list:
        return draw.sample(records, len(records))

    def asked(kind: str, text: str, *parts: str) -> PromptCandidate:
        if kind in DOCUMENT and draw.random() < 1 / 3:
            fields = dict.fromkeys(DATASETS[kind].prompt_fields, "")
            prompt = DATASETS[kind].inputs(fields | {DOCUMENT[kind]: text})
        else:
            prompt = draw.choice(REQUESTS[kind]).replace("{}", text)
        return PromptCandidate(kind, prompt, parts or (text,))

    instructions = shuffled(read("instructions", "train"))
    for record in instructions[: round(len(instructions) * SCALE.value)]:
        yield PromptCandidate("instructions", record["prompt"], (record["prompt"],))
    for record in shuffled(read("gsm8k", "train")):
        yield asked("gsm8k", record["question"])
    for record in shuffled(read("squad", "train")):
        question, whole = record["question"].strip(), record["context"]
        fields = {"question": question, "context": cut(whole, draw)}
        if draw.random() < 1 / 3:
            text = DATASETS["squad"].inputs(fields)
        else:
            text = draw.choice(REQUESTS["squad"])
            for name, value in fields.items():
                text = text.replace("{" + name + "}", value)
        yield PromptCandidate("squad", text, (question, whole))
    for record in shuffled(read("samsum", "train")):
        dialogue = record["dialogue"].replace("\r\n", "\n")
        yield asked("samsum", cut(dialogue, draw, "\n"))
    for record in shuffled(read("cnn_dailymail", "train")):
        yield asked("cnn_dailymail", cut(record["article"], draw))
    corpus = shuffled(list(documents()))
    for kind, sources in SIMILAR.items():
        texts = [record["text"] for record in corpus if record["source"] in sources]
        # Several passages of a document where there are few documents.
        for text in texts * 4:
            if kind == "lambada":
                part = passage(text, draw)
                yield PromptCandidate(kind, part.rsplit(" ", 1)[0], (part,))
            elif kind == "multi_news":
                pair = [
                    passage(one, draw, share=2) for one in (text, draw.choice(texts))
                ]
                yield asked(kind, ARTICLES.join(pair), *pair)
            else:
                yield asked(kind, passage(text, draw))


def documents() -> Iterator[dict]:
    """The documents of the corpus."""
    folder = pathlib.Path(cli.required("data")) / "corpus"
    paths = sorted(folder.glob("train-*.jsonl.gz"))
    if not paths:
        raise UserError(f"{folder} has no corpus: train-*.jsonl.gz are missing.")
    for path in paths:
        yield from read("corpus", pathlib.Path(path).name.removesuffix(".jsonl.gz"))


def passage(text: str, draw: random.Random, share: int = 1) -> str:
    """A passage that starts at a random sentence, `share` times as short as others."""
    begins = [match.end() for match in re.finditer(r"[.!?]\s+|\n+", text)]
    begin = draw.choice([0, *begins[: len(begins) * 2 // 3]])
    return cut(text[begin:], draw, share=share)


def cut(
    text: str, draw: random.Random, end: str = r"[.!?]\s+|\n", share: int = 1
) -> str:
    """A prefix of a text, of random length, that ends with a sentence."""
    text = text.strip()
    most = round(_SHORTEST_TEXT * (_LONGEST_TEXT / _SHORTEST_TEXT) ** draw.random())
    most //= share
    if len(text) <= most:
        return text
    ends = [match.end() for match in re.finditer(end, text[:most])]
    return text[: ends[-1] if ends else text.rfind(" ", 0, most)].strip()


def normalised(text: str) -> str:
    """The words of a text, in lower case, without punctuation."""
    return " ".join(re.findall(r"\w+", text.lower()))


def runs(text: str) -> Iterator[int]:
    """Hashes of all 13-grams of words of a normalised text."""
    words = text.split(" ")
    for begin in range(len(words) - RUN + 1):
        yield hash(" ".join(words[begin : begin + RUN]))


class MeasuredTexts:
    """Texts that prompts must not share."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.whole = {normalised(text) for text in texts}
        self.whole.discard("")
        self.runs = {run for text in self.whole for run in runs(text)}

    def shares(self, candidate: PromptCandidate) -> bool:
        """Whether a prompt or a part of it is among them, or shares a run of words."""
        words = [normalised(text) for text in (candidate.text, *candidate.parts)]
        return any(
            text in self.whole or not self.runs.isdisjoint(runs(text)) for text in words
        )


def measured_texts() -> Iterator[str]:
    """The texts of every file that is measured on."""
    for path, fields in MEASURED.items():
        for record in read(*path.split("/")):
            for field in fields:
                texts = record.get(field) or ""
                for text in texts if isinstance(texts, list) else [texts]:
                    yield str(text)


if __name__ == "__main__":
    cli.run(main)
