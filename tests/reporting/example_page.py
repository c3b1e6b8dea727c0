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
TASKS = ["LAMBADA", "SQuAD", "CNN/DM", "SAMSum", "MultiNews", "XSum", "NewsRoom"]
# Block efficiency of these tasks in the paper's Table 4.
PAPER = {
    "BPD": [3.12, 2.08, 1.74, 1.27, 1.10, 1.13, 1.08],
    "2-gram": [3.06, 2.09, 1.73, 1.31, 1.13, 1.17, 1.20],
    "4-gram": [3.05, 2.07, 1.73, 1.29, 1.12, 1.16, 1.18],
    "61M": [3.10, 2.10, 1.73, 1.39, 1.25, 1.23, 1.29],
    "16-best 0-gram": [3.23, 2.18, 1.82, 1.37, 1.13, 1.18, 1.11],
    "16-best 4-gram": [3.29, 2.22, 1.83, 1.45, 1.22, 1.26, 1.31],
    "Oracle, 16": [3.67, 2.45, 2.26, 1.95, 1.43, 1.55, 1.50],
}
GROUPS = ["", "1-best", "1-best", "1-best", "p-best", "p-best", "bound"]
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
    "settings": {
        "max_new_tokens": 64,
        "longest_prompt": 384,
        "longest_whole": 768,
        "lattice_width": 16,
    },
    "left_out": {"neural:1@narrow": "there is no model 'narrow'."},
}


def table4() -> Exhibit:
    rows = []
    for index, task in enumerate([*TASKS, "Mean"]):
        cells = []
        for values in PAPER.values():
            mean = sum(values) / len(values)
            paper = values[index] if index < len(values) else mean
            value = 1 + 0.8 * (paper - 1) + 0.05
            cells.append(Cell(value, paper, (0.95 * value, 1.06 * value)))
        if task == "XSum":
            cells[3] = Cell(paper=1.23, text="not measured")
        rows.append(Row(task, cells, strong=task == "Mean"))
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
    return Exhibit(
        "table4",
        "Block efficiency of refined drafts",
        "Tables 4 and 9",
        "How many tokens does one serial call yield when its draft is refined by "
        "n-gram models, small neural ones, or both their best paths?",
        [
            Table(
                "table4",
                "Block efficiency",
                "Task",
                columns,
                rows,
                "Intervals are 95 % bootstrap intervals over examples. Oracle: the "
                "longest prefix of the text that lies in the lattice.",
            ),
            gains,
        ],
        findings=[
            Finding(
                "16-best 4-gram drafts beat 16-best 0-gram drafts on every task.",
                True,
                "7 of 7 tasks; the least gain is 0.01 on CNN/DM.",
            ),
            Finding(
                "Rescoring never lowers block efficiency.",
                False,
                "LAMBADA changes by -0.06 with 2-grams of SmolLM2-135M.",
            ),
            Finding(
                "Larger rescorers are better.",
                None,
                "Only one size was trained for this model.",
            ),
        ],
        notes=["SmolLM2 is not the paper’s model; its numbers stand as reference."],
        facts=FACTS,
    )


def figure3() -> Exhibit:
    efficiencies = PAPER["BPD"]
    hmax = [9, 7, 6, 3, 2, 2, 1]
    slope, start = 0.21, 0.72
    return Exhibit(
        "figure3",
        "Entropy of the heads",
        "Figure 3",
        "Do heads grow less sure the farther they look ahead?",
        charts=[
            Chart(
                "figure3a",
                "Mean entropy of every head",
                LINES,
                "head",
                "entropy (nats)",
                [
                    Series(
                        task,
                        list(range(1, 10)),
                        [1 + 0.2 * n + 0.6 * h**0.5 - 0.1 * n * h for h in range(9)],
                    )
                    for n, task in enumerate(TASKS)
                ],
            ),
            Chart(
                "figure3b",
                "Block efficiency and h_max",
                POINTS,
                "h_max",
                "block efficiency",
                [
                    Series("task", hmax, efficiencies, names=TASKS),
                    Series(
                        "fitted line, R = 0.97",
                        [1, 9],
                        [start + slope, start + 9 * slope],
                        dashed=True,
                    ),
                ],
            ),
        ],
        facts=FACTS,
    )


def figure6() -> Exhibit:
    widths = list(range(1, 17))
    charts = []
    for task, base in zip(TASKS[:6], PAPER["BPD"], strict=False):
        series = []
        for heads in (3, 6, 9):
            y = [base * (1 + 0.05 * heads * math.log(1 + k) / 3) for k in widths]
            series.append(
                Series(
                    f"{heads} heads",
                    widths,
                    y,
                    [0.95 * v for v in y],
                    [1.05 * v for v in y],
                )
            )
        series.append(
            Series("9 heads, paper", [2, 16], [base, 1.2 * base], dashed=True)
        )
        charts.append(
            Chart(
                f"figure6_{task.lower().replace('/', '_')}",
                task,
                LINES,
                "candidates per head (k)",
                "block efficiency",
                series,
            )
        )
    latency = Chart(
        "latency",
        "Refining a lattice, by drafts asked for",
        LINES,
        "drafts (p)",
        "milliseconds",
        [Series("device", [1, 2, 4, 8, 16], [1.63, 1.75, 1.88, 1.87, 1.98])],
        logarithmic=True,
    )
    gains = Chart(
        "gains",
        "Gain over BPD by method and category of Spec-Bench",
        BARS,
        "",
        "gain (%)",
        [
            Series("n-gram", [0, 1, 2, 3, 4, 5], [12, 8, -3, 22, 9, 4.5],
                   [10, 5, -6, 18, 7, 1], [14, 11, 0, 27, 11, 9]),
            Series("n-gram, paper", [0, 1, 2, 3, 4, 5], [10, 9, 2, 17, 7, 8],
                   dashed=True),
            Series("neural", [0, 1, 2, 3, 4, 5], [7, 4, -1, 12, 3, 2]),
        ],
        [
            "MT-Bench",
            "Translation",
            "Summarization",
            "Question answering",
            "Mathematical reasoning",
            "Retrieval-augmented generation",
        ],
    )  # fmt: skip
    return Exhibit(
        "figure6",
        "Oracle block efficiency",
        "Figure 6",
        "What could the best path through every lattice give?",
        charts=[*charts, latency, gains],
        notes=["Bands are 95 % bootstrap intervals."],
    )


def words_of(text: str) -> list[str]:
    return re.findall(r"\n| ?[^\W_]+| ?[^\w\s]|\s", text)


def explorer_text(task: str, example: int, prompt: str, text: str) -> ExplorerText:
    """A text whose true tokens have any rank in its lattices, or are missing."""
    rng = random.Random(example)
    tokens = words_of(text)
    extra = [NASTY, "&amp;", " שלום", "\u202e", "\n\n", "\t", "", " 日本語", " a"]
    pieces = list(dict.fromkeys([*tokens, *extra, *words_of(prompt)]))
    output = [pieces.index(token) for token in tokens]
    candidates, log_probs = [], []
    for at in range(len(output)):
        heads, scores = [], []
        for head in range(1, HEADS):
            row = rng.sample(range(len(pieces)), WIDTH)
            truth = output[at + head] if at + head < len(output) else None
            rank = min(int(rng.expovariate(1 / (0.6 * head))), WIDTH)
            if truth is not None:
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
            best = [output[at]] + [heads[0] for heads in candidates[at]]
            winner = [output[at]]
            for head, row in enumerate(candidates[at], start=1):
                truth = output[at + head] if at + head < len(output) else None
                winner.append(truth if truth in row[:depth] else row[0])
            accepted = 1
            while (
                accepted < len(winner)
                and at + accepted < len(output)
                and winner[accepted] == output[at + accepted]
            ):
                accepted += 1
            calls.append(
                {
                    "at": at,
                    "draft": best,
                    "winner": winner,
                    "accepted": accepted,
                    "rank": 3 if winner != best else 0,
                }
            )
            at += accepted
        traces.append({"contender": contender, "label": label, "calls": calls})
    return ExplorerText(
        key=f"{task.lower()}/{example}",
        group=task,
        title=title_of(prompt, example),
        prompt=prompt,
        pieces=pieces,
        output=output,
        candidates=candidates,
        log_probs=log_probs,
        traces=traces,
    )


def example_page(lattice: LatticePicture) -> Page:
    """A page of four studies with three texts to step through."""
    figure4 = Exhibit(
        "figure4",
        "A lattice",
        "Figure 4",
        "Where do the drafts of one block part?",
        lattices=[lattice],
    )
    story = (
        "The old lighthouse keeper climbed the stairs, lit the lamp, and wrote in his "
        "book: the sea is calm tonight.\nNo ship was seen before the morning came."
    )
    return Page(
        "Drafts in blockwise parallel decoding",
        "2025-01-31",
        [
            PagePart("table4", table4()),
            PagePart("figure3", figure3()),
            PagePart("figure4", figure4),
            PagePart("figure6_tiny", figure6(), "tiny"),
        ],
        [
            KeyFigure("Drafts as they are", "1.57", "tokens per serial call"),
            KeyFigure("Best method", "1.80", "16-best 4-gram: +14.6 %"),
            KeyFigure("Oracle", "2.41", "the bound of the same lattices"),
            KeyFigure("Headroom taken", "27 %", "by 16-best 4-gram"),
        ],
        [
            explorer_text("SQuAD", 0, "question: who lit it?\n\nA keeper did.", story),
            explorer_text("SQuAD", 4, f"{NASTY} & more", "It is calm. " * 9),
            explorer_text("XSum", 2, "Summarize: שלום and 日本語", story[::-1]),
        ],
    )
