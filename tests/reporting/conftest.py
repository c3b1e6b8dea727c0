"""A made-up report of an evaluation on Python source code, and a page of studies."""

import math
import random
import re

import pytest

from bpd_jax.reporting.page import Page
from bpd_jax.reporting.records import (
    Candidate,
    DecodeRecord,
    EvaluationReport,
    LatticePicture,
    MethodSummary,
    Path,
    Step,
)
from tests.reporting.example_page import example_page

HEADS = 8
# Name, label, and the probability that a drafted token is right.
METHODS = [
    ("greedy", "Greedy", 0.0),
    ("bpd", "BPD", 0.42),
    ("zero_gram", "16-best 0-gram", 0.46),
    ("ngram_1", "4-gram, 1-best", 0.49),
    ("ngram_p", "16-best 4-gram", 0.55),
    ("oracle", "Oracle, 16 candidates", 0.78),
]
PROMPTS = [
    (
        "class Stack:\n    def __init__(self):\n        self._items = []\n\n",
        "    def push(self, item):\n        self._items.append(item)\n\n"
        "    def pop(self):\n        if not self._items:\n"
        '            raise IndexError("pop from an empty stack")\n'
        "        return self._items.pop()\n",
    ),
    (
        "def render(name, rows):\n    # <table> & friends\n",
        '    cells = \'</script><b onclick="x">\' + name + "&amp;"\n'
        '    if len(rows) < 2 and name != "":\n        return cells\n'
        "    return \"<tr>\" + ''.join(rows) + '</tr>'\n",
    ),
    (
        "import math\n\n\ndef is_prime(n):\n",
        "    if n < 2:\n        return False\n"
        "    for divisor in range(2, math.isqrt(n) + 1):\n"
        "        if n % divisor == 0:\n            return False\n"
        "    return True\n",
    ),
]


def pieces_of(text: str) -> list[str]:
    """Splits text roughly as a byte-pair vocabulary for code does."""
    return re.findall(r"\n+ *| +(?= )| ?[A-Za-z_]\w*| ?\d+| ?[^\w\s]{1,3}|\s", text)


def decode(prompt_index: int, method: str, accuracy: float) -> DecodeRecord:
    """Drafts whose tokens after the first are right with probability `accuracy`.

    A token is equally hard for every method, so a better method is better everywhere.
    """
    prompt, text = PROMPTS[prompt_index]
    rng = random.Random(prompt_index)
    pieces = pieces_of(text)
    hardness = [rng.random() for _ in pieces]
    steps: list[Step] = []
    position = 0
    while position < len(pieces):
        draft = pieces[position : position + (1 if accuracy == 0 else HEADS)]
        accepted = 1
        while accepted < len(draft) and hardness[position + accepted] < accuracy:
            accepted += 1
        draft[accepted:] = ["wrong"] * (len(draft) - accepted)
        rank = rng.choice([0, 0, 0, 1, 4]) if "p" in method and accepted > 2 else 0
        steps.append(Step(draft, accepted, rank))
        position += accepted
    return DecodeRecord(
        method=method,
        prompt_index=prompt_index,
        prompt=prompt,
        text=text,
        input_ids=list(range(len(pieces_of(prompt)))),
        output_ids=list(range(len(pieces))),
        serial_calls=len(steps),
        block_efficiency=len(pieces) / len(steps),
        seconds=0.011 * len(steps),
        steps=steps,
    )


def summarise(records: list[DecodeRecord]) -> list[MethodSummary]:
    """Sums over prompts; statistics of drafts are made up."""
    summaries: list[MethodSummary] = []
    for name, label, accuracy in METHODS:
        decoded = [record for record in records if record.method == name]
        calls = sum(record.serial_calls for record in decoded)
        tokens = sum(len(record.output_ids) for record in decoded)
        efficiency = tokens / calls
        drafts = {
            "interval": (0.93 * efficiency, 1.08 * efficiency),
            "nodes": 61.4,
            "repeated": 0.03,
            "longest_run": 1.2,
            "entropies": [1.84 + 0.4 * head for head in range(7)],
            "accepted": [1 / HEADS] * HEADS,
        }
        if len(summaries) > 1:
            drafts["gain"] = efficiency / summaries[1].block_efficiency - 1
            drafts["gain_interval"] = (0.083, 0.217)
        summaries.append(
            MethodSummary(
                name=name,
                label=label,
                block_efficiency=efficiency,
                serial_calls=calls,
                tokens=tokens,
                seconds=sum(record.seconds for record in decoded),
                speedup=0.8 + 0.1 * len(summaries),
                upper_bound=name == "oracle",
                **(drafts if accuracy else {"nodes": 1.0, "accepted": [1.0]}),
            )
        )
    return summaries


def lattice() -> LatticePicture:
    """Eight positions of eight candidates; some true tokens rank low or are missing."""
    rng = random.Random(3)
    prompt, text = PROMPTS[-1]
    start = text.index(" divisor")
    greedy = pieces_of(text[start:])[:HEADS]
    pool = sorted({piece for _, other in PROMPTS for piece in pieces_of(other)})
    positions = [[Candidate(greedy[0], math.log(0.97))]]
    for column, rank in enumerate([0, 1, 0, 2, 0, 8, 3], start=1):
        others = rng.sample([piece for piece in pool if piece != greedy[column]], 8)
        if rank < 8:
            others[rank] = greedy[column]
        best = 0.75 / column**0.6
        positions.append(
            [
                Candidate(piece, math.log(best * (1 - best) ** row))
                for row, piece in enumerate(others)
            ]
        )
    return LatticePicture(
        prompt_tail=prompt + text[:start],
        positions=positions,
        paths=[
            Path("BPD", [0] * HEADS, accepted=2),
            Path("Best 4-gram", [0, 0, 1, 0, 0, 1, 0, 0], accepted=4),
            Path("Winner of 16-best 4-gram", [0, 0, 1, 0, 2, 0, 1, 0], accepted=6),
        ],
        greedy=greedy,
    )


@pytest.fixture(scope="session")
def report() -> EvaluationReport:
    records = [
        decode(prompt_index, name, accuracy)
        for prompt_index in range(len(PROMPTS))
        for name, _, accuracy in METHODS
    ]
    return EvaluationReport(
        title="Refined drafts on Python source code",
        created="2025-01-31",
        task="python_code, 3 prompts of the test split",
        device="CPU, 2 cores",
        methods=summarise(records),
        records=records,
        model={"parameters": 3_412_480, "layers": 4, "width": 256, "heads": HEADS},
        settings={"candidates": 16, "drafts": 16, "alpha": 0.9, "dtype": "float32"},
        versions={"bpd_jax": "0.1.0", "jax": "0.10.2", "python": "3.11.9"},
        lattice=lattice(),
        curves=[{"step": n, "loss": 9 / n, "loss_head_1": 3 / n} for n in (1, 2, 3)],
        notes=["The n-gram model was estimated on the training split alone."],
    )


@pytest.fixture(scope="session")
def paper_report(report) -> Page:
    return example_page(report.lattice)
