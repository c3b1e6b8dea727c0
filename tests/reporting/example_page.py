"""Made-up exhibits and explorer texts with every element that a page can have."""

import math
import random
import re

from bpd_jax.reporting.exhibits import (
    BARS,
    LINES,
    POINTS,
    Cell,
    Chart,
    Column,
    Exhibit,
    Finding,
    Row,
    Series,
    Table,
)
from bpd_jax.reporting.explorer import ExplorerText, title_of
from bpd_jax.reporting.page import KeyFigure, Page, PagePart
from bpd_jax.reporting.records import LatticePicture

HEADS = 8
NASTY = "</script><img src=x onerror=alert(1)>"
WIDTH = 16
# Block efficiency in the paper's Table 4, by method and task.
TASKS = ["LAMBADA", "SQuAD", "SAMSum", "XSum"]
PAPER = {
    "BPD": [3.12, 2.08, 1.27, 1.13],
    "2-gram": [3.06, 2.09, 1.31, 1.17],
    "61M": [3.10, 2.10, 1.39, 1.23],
    "16-best 4-gram": [3.29, 2.22, 1.45, 1.26],
    "Oracle, 16": [3.67, 2.45, 1.95, 1.55],
}
GROUPS = ["", "1-best", "1-best", "p-best", "bound"]
FACTS = {
    "command": "python -m experiments.run table4 --size=smollm2 --limit=50",
    "date": "2025-01-31",
    "device": "cpu × 1, 2 cores, x86_64",
    "model": "SmolLM2-135M-Instruct, 8 heads",
    "versions": {"bpd_jax": "0.7.0", "jax": "0.10.2"},
    "gin": "Study.examples = 50\nStudy.contenders = [\n  'bpd',\n  'ngram:16']\n",
    "labels": {"bpd": "BPD"},
    "trunk": "30 layers, 576 / 1536 wide",
    "heads": 8,
    "examples": {"squad": {"report": 24, "tune": 12}, "rag": {"report": 15, "tune": 9}},
    "settings": {"max_new_tokens": 64, "longest_prompt": 384, "lattice_width": 16},
    "left_out": {"neural:1@narrow": "there is no model 'narrow'."},
}


def table4() -> Exhibit:
    rows = []
    for index, task in enumerate(TASKS):
        values = [0.25 + 0.8 * column[index] for column in PAPER.values()]
        cells = [
            Cell(value, column[index], (0.95 * value, 1.06 * value))
            for value, column in zip(values, PAPER.values(), strict=True)
        ]
        rows.append(Row(task, cells, strong=task == "XSum"))
    rows[-1].cells[2] = Cell(paper=1.23, text="not measured")
    columns = [Column(name, group) for name, group in zip(PAPER, GROUPS, strict=True)]
    gains = Table(
        "table4_gain",
        "Gain over BPD",
        "Task",
        [Column("16-best 4-gram", digits=1, unit="+%"), Column("time", "", 3, "ms")],
        [
            Row("SQuAD", [Cell(6.73, interval=(-1.2, 9.9)), Cell(1234.5)]),
            Row("<b>&amp; co", [Cell(-2.25, 5.0), Cell()]),
        ],
    )
    caption = "Intervals are 95 % bootstrap intervals over examples."
    return Exhibit(
        "table4",
        "Block efficiency of refined drafts",
        "Tables 4 and 9",
        "How many tokens does one serial call yield when its draft is refined?",
        [Table("table4", "Block efficiency", "Task", columns, rows, caption), gains],
        findings=[
            Finding(
                "16-best 4-gram drafts beat 16-best 0-gram drafts.", True, "7 of 7."
            ),
            Finding("Rescoring never lowers it.", False, "LAMBADA changes by -0.06."),
            Finding("Larger rescorers are better.", None, "Only one was trained."),
        ],
        notes=["SmolLM2 is not the paper’s model; its numbers stand as reference."],
        facts=FACTS,
    )


def figures() -> list[Exhibit]:
    """Lines with bands, points with names, a logarithmic axis, and bars."""
    heads, ks = list(range(1, 10)), list(range(1, 17))
    entropies = [
        Series(task, heads, [1 + 0.2 * n + 0.6 * (h - 1) ** 0.5 for h in heads])
        for n, task in enumerate(TASKS)
    ]
    points = [
        Series("task", [9, 7, 3, 2], PAPER["BPD"], names=TASKS),
        Series("fitted line, R = 0.97", [1, 9], [0.93, 2.61], dashed=True),
    ]
    y = [1 + 0.3 * math.log(k) for k in ks]
    low, high = ([share * value for value in y] for share in (0.95, 1.05))
    candidates = [
        Series("9 heads", ks, y, low, high),
        Series("9 heads, paper", [2, 16], [1.0, 1.2], dashed=True),
    ]
    latency = [Series("device", [1, 2, 4, 8, 16], [1.63, 1.75, 1.88, 1.87, 1.98])]
    gains = [
        Series("n-gram", [0, 1, 2], [12, 8, -3], [10, 5, -6], [14, 11, 0]),
        Series("n-gram, paper", [0, 1, 2], [10, 9, 2], dashed=True),
    ]
    names = ["MT-Bench", "Question answering", "Retrieval-augmented generation"]
    question = "Do heads grow less sure the farther they look ahead?"
    charts = [
        Chart("figure3a", "Mean entropy", LINES, "head", "nats", entropies),
        Chart("figure3b", "Over h_max", POINTS, "h_max", "tokens", points),
    ]
    more_charts = [
        Chart("figure6_squad", "SQuAD", LINES, "k", "tokens", candidates),
        Chart("latency", "Latency", LINES, "p", "ms", latency, [], True),
        Chart("gains", "Gain over BPD", BARS, "", "gain (%)", gains, names),
    ]
    entropy, oracle = "Entropy of the heads", "Oracle block efficiency"
    return [
        Exhibit("figure3", entropy, "Figure 3", question, charts=charts, facts=FACTS),
        Exhibit("figure6", oracle, "Figure 6", "What could it be?", charts=more_charts),
    ]


def words_of(text: str) -> list[str]:
    return re.findall(r"\n| ?[^\W_]+| ?[^\w\s]|\s", text)


def explorer_text(task: str, example: int, prompt: str, text: str) -> ExplorerText:
    """A text whose true tokens have any rank in its lattices, or are missing."""
    rng = random.Random(example)
    tokens = words_of(text)
    extra = [NASTY, "&amp;", " שלום", "\u202e", "\n\n", "\t", "", " 日本語", " a"]
    pieces = list(dict.fromkeys([*tokens, *extra, *words_of(prompt)]))
    output = [pieces.index(token) for token in tokens]
    truths = [*output, *[-1] * HEADS]
    candidates, log_probs = [], []
    for at in range(len(output)):
        heads, scores = [], []
        for head in range(1, HEADS):
            row = rng.sample(range(len(pieces)), WIDTH)
            truth = truths[at + head]
            rank = min(int(rng.expovariate(1 / (0.6 * head))), WIDTH)
            if truth >= 0:
                row = [token for token in row if token != truth]
                if rank < WIDTH:
                    row.insert(rank, truth)
            heads.append(row[:WIDTH])
            best = 0.7 / head**0.5
            scores.append([math.log(best * (1 - best) ** r) for r in range(len(row))])
        candidates.append(heads)
        log_probs.append([row[:WIDTH] for row in scores])
    traces = []
    for contender, label, depth in [
        ("bpd", "BPD", 1),
        ("ngram:16@general_2", "16-best 2-gram", 3),
        ("oracle", "Oracle", WIDTH),
    ]:
        calls, at = [], 0
        while at < len(output):
            draft, winner = [output[at]], [output[at]]
            for truth, row in zip(truths[at + 1 :], candidates[at], strict=False):
                draft.append(row[0])
                winner.append(truth if truth in row[:depth] else row[0])
            pairs = zip(winner, truths[at:], strict=False)
            equal = [token == truth for token, truth in pairs]
            call = {"at": at, "draft": draft, "winner": winner}
            call["accepted"] = (*equal, False).index(False)
            calls.append({**call, "rank": 3 if winner != draft else 0})
            at += call["accepted"]
        traces.append({"contender": contender, "label": label, "calls": calls})
    key, title = f"{task.lower()}/{example}", title_of(prompt, example)
    return ExplorerText(
        key, task, title, prompt, pieces, output, candidates, log_probs, traces
    )


def example_page(lattice: LatticePicture) -> Page:
    """A page of four studies with three texts to step through."""
    figure3, figure6 = figures()
    figure4 = Exhibit("figure4", "A lattice", "Figure 4", "Where?", lattices=[lattice])
    story = (
        "The old lighthouse keeper climbed the stairs, lit the lamp, and wrote: "
        "the sea is calm tonight.\nNo ship was seen before the morning came."
    )
    return Page(
        "Drafts in blockwise parallel decoding",
        "2025-01-31",
        [
            PagePart("table4", table4()),
            PagePart("figure3", figure3),
            PagePart("figure4", figure4),
            PagePart("figure6_tiny", figure6, "tiny"),
        ],
        [
            KeyFigure("Drafts as they are", "1.57", "tokens per serial call"),
            KeyFigure("Headroom taken", "27 %", "by 16-best 4-gram"),
        ],
        [
            explorer_text("SQuAD", 0, "question: who lit it?\n\nA keeper did.", story),
            explorer_text("SQuAD", 4, f"{NASTY} & more", "It is calm. " * 9),
            explorer_text("XSum", 2, "Summarize: שלום and 日本語", story[::-1]),
        ],
    )
