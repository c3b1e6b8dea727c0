"""Writes the training prompts of SmolLM2, excluding all evaluation data.

    python experiments/smollm2/training_prompts.py --data=FOLDER \\
        --output=runs/smollm2/prompts/scale

FOLDER contains JSON Lines of public data sets with the field names of TensorFlow
Datasets, `instructions/train.jsonl.gz` (field `prompt`), and a corpus in
`corpus/train-*.jsonl.gz` (field `text`). Prompts are unmodified instructions, records
of training splits with a request, and passages of the corpus with a request. A prompt
is dropped if it, or a text in it, equals a text of an evaluation file, or shares a
13-gram of words with one (ignoring case and punctuation).

Writes `greedy.jsonl` and, for every fourth prompt, `sampled.jsonl`.
"""

import glob
import pathlib
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from absl import flags
from prompts import SEED, read, write

from bpd_jax import cli
from bpd_jax.errors import UserError

SAMPLED = flags.DEFINE_float("sampled", 0.25, "Share of the prompts to sample from.")
SCALE = flags.DEFINE_float("scale", 1.0, "Factor of the number of prompts of a kind.")

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
# Maximum number of prompts of each kind.
_GSM8K, _SQUAD, _SQUAD_QUESTIONS, _SAMSUM, _CNN, _PASSAGES = (
    4500,
    2500,
    1500,
    3500,
    200,
    10000,
)
# Bounds of the length of a passage in characters, which is log-uniform.
_SHORTEST_TEXT, _LONGEST_TEXT = 200, 1700

# `{}` stands for the text.
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
    "question": ("{}", "{}", "{} Explain.", "Can you tell me: {}", "Short answer: {}"),
    "dialogue": (
        "Here is a dialogue: {}\nWrite a short summary!",
        "Summarize this conversation:\n\n{}",
        "{}\n\nWhat is this conversation about?",
        "Read the chat below and say in two sentences what happened.\n\n{}",
        "Summarize the dialogue.\n{}\nSummary:",
        "What do the people in this chat agree on?\n\n{}",
        "Write down what happens next in this conversation:\n\n{}",
    ),
    "article": (
        "Summarize: {}",
        "Summarize the following article in three sentences.\n\n{}",
        "{}\n\nTL;DR:",
        "What are the main points of this news story?\n\n{}",
        "Write a headline and a short summary for this article: {}",
    ),
    "passage": (
        "Summarize: {}",
        "Summarize the following text in a few sentences.\n\n{}",
        "{}\n\nSummarize this.",
        "Explain this in simple words:\n\n{}",
        "Explain the following passage to a student.\n\n{}",
        "Continue this text:\n\n{}",
        "Write the next paragraph.\n\n{}",
        "{}\n\nContinue.",
        "Rewrite this in a friendlier tone:\n\n{}",
        "Rewrite the following text so that it is shorter: {}",
        "Rewrite this passage in your own words.\n\n{}",
        "List the key points:\n\n{}",
        "List the key points of this text as bullet points.\n\n{}",
        "Write three questions about this text and answer them.\n\n{}",
        "Ask a question that this text answers, then answer it.\n\n{}",
        "Translate to French: {}",
        "Translate this into German:\n\n{}",
        "Translate the following text to Spanish.\n\n{}",
        "What is the main idea of this passage?\n\n{}",
        "Give this text a title and say why it fits.\n\n{}",
        "Who or what is this text about? {}",
        "Correct the grammar of this text, and list what you changed: {}",
        "Turn this into an email to a colleague:\n\n{}",
        "Do you agree with this? Give reasons.\n\n{}",
        "Write a short story that begins like this: {}",
        "Extract the names, places and dates from this text.\n\n{}",
    ),
}


class PromptCandidate(NamedTuple):
    """A prompt.

    Attributes:
      text: all of it.
      parts: the texts of a data set that it contains.
    """

    text: str
    parts: tuple[str, ...]


def main() -> None:
    """Draws prompts from the data sets, filters them and writes them."""
    output = pathlib.Path(cli.required("output"))
    draw = random.Random(SEED.value)
    if not 0 <= SAMPLED.value <= 1:
        raise UserError(f"--sampled is {SAMPLED.value}: it must be in 0 … 1.")
    measured = MeasuredTexts(measured_texts())
    seen: set[str] = set()
    kept, refused = [], 0
    for candidate in candidates(draw):
        key = normalised(candidate.text)
        if key in seen:
            continue
        seen.add(key)
        if measured.shares(candidate):
            refused += 1
        else:
            kept.append(candidate.text)
    draw.shuffle(kept)
    print(f"{refused} prompts share text with evaluation data and are left out.")
    count = round(len(kept) * SAMPLED.value)
    write(output / "sampled.jsonl", kept[:count])
    write(output / "greedy.jsonl", kept[count:])


def candidates(draw: random.Random) -> Iterator[PromptCandidate]:
    """Prompts of every kind."""

    def some(records: list, most: int) -> list:
        count = round(most * SCALE.value)
        return draw.sample(records, min(count, len(records)))

    def asked(kind: str, text: str) -> PromptCandidate:
        return PromptCandidate(draw.choice(REQUESTS[kind]).replace("{}", text), (text,))

    instructions = read("instructions", "train")
    for record in some(instructions, len(instructions)):
        yield PromptCandidate(record["prompt"], (record["prompt"],))
    for record in some(read("gsm8k", "train"), _GSM8K):
        yield asked("gsm8k", record["question"])
    squad = some(read("squad", "train"), _SQUAD + _SQUAD_QUESTIONS)
    for number, record in enumerate(squad):
        question = record["question"].strip()
        context = cut(record["context"], draw)
        if number < round(_SQUAD_QUESTIONS * SCALE.value):
            yield asked("question", question)
        else:
            request = draw.choice(REQUESTS["squad"])
            text = request.replace("{question}", question).replace("{context}", context)
            yield PromptCandidate(text, (question, record["context"]))
    for record in some(read("samsum", "train"), _SAMSUM):
        dialogue = record["dialogue"].replace("\r\n", "\n")
        yield asked("dialogue", cut(dialogue, draw, "\n"))
    for record in some(read("cnn_dailymail", "train"), _CNN):
        yield asked("article", cut(record["article"], draw))
    for text in some(list(passages(draw)), _PASSAGES):
        yield asked("passage", text)


def passages(draw: random.Random) -> Iterator[str]:
    """A passage of every document of the corpus, starting at a random sentence."""
    folder = pathlib.Path(cli.required("data")) / "corpus"
    paths = sorted(glob.glob(str(folder / "train-*.jsonl.gz")))
    if not paths:
        raise UserError(f"{folder} has no corpus: train-*.jsonl.gz are missing.")
    for path in paths:
        for record in read("corpus", pathlib.Path(path).name.removesuffix(".jsonl.gz")):
            begins = [m.end() for m in re.finditer(r"[.!?]\s+|\n+", record["text"])]
            begin = draw.choice([0, *begins[: len(begins) // 2]])
            text = cut(record["text"][begin:], draw)
            if len(text) >= _SHORTEST_TEXT // 2:
                yield text


def cut(text: str, draw: random.Random, end: str = r"[.!?]\s+|\n") -> str:
    """A prefix of a text, of random length, that ends with a sentence."""
    text = text.strip()
    most = round(_SHORTEST_TEXT * (_LONGEST_TEXT / _SHORTEST_TEXT) ** draw.random())
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


def measured_texts(
    read: Callable[[str, str], list[dict]] = read,
) -> Iterator[str]:
    """The texts of every file that is measured on."""
    for path, fields in MEASURED.items():
        for record in read(*path.split("/")):
            for field in fields:
                texts = record.get(field) or ""
                for text in texts if isinstance(texts, list) else [texts]:
                    yield str(text)


if __name__ == "__main__":
    cli.run(main)
