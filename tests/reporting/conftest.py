"""A made-up report of an evaluation, and a page of studies."""

import math

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
from tests.reporting.example_page import example_page, words_of

HEADS = 8
# Name, label, and the number of tokens that a call accepts.
METHODS = [
    ("greedy", "Greedy", 1),
    ("bpd", "BPD", 2),
    ("ngram_p", "16-best 4-gram", 3),
    ("oracle", "Oracle, 16 candidates", 5),
]
PROMPTS = [
    ("import math\n\n\ndef is_prime(n):\n", "    if n < 2:\n        return False\n"),
    (
        "# <table> & friends\n",
        'cells = \'</script><b onclick="x">\' + name + "&amp;"\n',
    ),
]


def decode(prompt_index: int, method: str, accepted: int) -> DecodeRecord:
    prompt, text = PROMPTS[prompt_index]
    pieces = words_of(text)
    steps = [
        Step([*pieces[at : at + accepted], "wrong"], len(pieces[at : at + accepted]))
        for at in range(0, len(pieces), accepted)
    ]
    return DecodeRecord(
        method=method,
        prompt_index=prompt_index,
        prompt=prompt,
        text=text,
        input_ids=list(range(len(words_of(prompt)))),
        output_ids=list(range(len(pieces))),
        serial_calls=len(steps),
        block_efficiency=len(pieces) / len(steps),
        seconds=0.011 * len(steps),
        steps=steps,
    )


def summarise(number: int, records: list[DecodeRecord]) -> MethodSummary:
    """Sums over prompts; statistics of drafts are made up."""
    name, label, accepted = METHODS[number]
    calls = sum(record.serial_calls for record in records)
    tokens = sum(len(record.output_ids) for record in records)
    drafts = {
        "interval": (0.93 * tokens / calls, 1.08 * tokens / calls),
        "nodes": 61.4,
        "repeated": 0.03,
        "longest_run": 1.2,
        "entropies": [1.84 + 0.4 * head for head in range(7)],
        "accepted": [1 / HEADS] * HEADS,
    }
    if number > 1:
        drafts |= {"gain": accepted / 2 - 1, "gain_interval": (0.083, 0.217)}
    return MethodSummary(
        name=name,
        label=label,
        block_efficiency=tokens / calls,
        serial_calls=calls,
        tokens=tokens,
        seconds=sum(record.seconds for record in records),
        speedup=0.8 + 0.1 * number,
        upper_bound=name == "oracle",
        **(drafts if number else {"nodes": 1.0, "accepted": [1.0]}),
    )


@pytest.fixture(scope="session")
def report() -> EvaluationReport:
    records = [
        decode(index, name, accepted)
        for index in range(len(PROMPTS))
        for name, _, accepted in METHODS
    ]
    methods = [
        summarise(number, records[number :: len(METHODS)])
        for number in range(len(METHODS))
    ]
    greedy = [" divisor", " in", " range"]
    positions = [[Candidate(piece, math.log(0.9))] for piece in (greedy[0], "a", "b")]
    positions[1].append(Candidate(greedy[1], math.log(0.1)))
    paths = [Path("BPD", [0, 0, 0], 1), Path("Best 4-gram", [0, 1, 0], 2)]
    return EvaluationReport(
        title="Refined drafts on Python source code",
        created="2025-01-31",
        task="python_code, 2 prompts of the test split",
        device="CPU, 2 cores",
        methods=methods,
        records=records,
        model={"parameters": 3_412_480, "layers": 4, "width": 256, "heads": HEADS},
        settings={"candidates": 16, "drafts": 16, "alpha": 0.9, "dtype": "float32"},
        versions={"bpd_jax": "0.1.0", "jax": "0.10.2", "python": "3.11.9"},
        lattice=LatticePicture(PROMPTS[0][0], positions, paths, greedy),
        curves=[{"step": n, "loss": 9 / n, "loss_head_1": 3 / n} for n in (1, 2, 3)],
        notes=["The n-gram model was estimated on the training split alone."],
    )


@pytest.fixture(scope="session")
def paper_report(report) -> Page:
    return example_page(report.lattice)
