"""The claims of the paper and its rebuttal, and the table of their verdicts.

`python -m experiments.verdicts --write` puts it into docs/reproduction.md. Verdicts
follow from committed records by the rule of `bpd_jax.studies.claims`; a test computes
them again and compares the page with them.
"""

import pathlib
from collections.abc import Iterator

from bpd_jax.studies.claims import (
    AGREES,
    BY_CONSTRUCTION,
    CONTRARY,
    Claim,
    summary,
    verdict,
)
from bpd_jax.studies.run_files import HEADER, open_run
from experiments import printed
from experiments.claim_measures import (
    FOUR_GRAM,
    FOUR_GRAM_16,
    NEURAL,
    TWO_GRAM,
    costs,
    entropy_rises,
    entropy_trend,
    gain,
    highest,
    latency,
    lowest,
    repairs,
    repairs_drive_gains,
    repetition,
    timed,
    weak_gain,
    weak_headroom,
    weight_trend,
)

_HERE = pathlib.Path(__file__).parent
PAGE = _HERE.parent / "docs" / "reproduction.md"
BEGIN, END = "<!-- verdicts -->", "<!-- end of verdicts -->"

SIZES = {
    "smollm2_heads": "independent heads",
    "smollm2": "block drafter",
    "small": "trained jointly",
    "small_sampled": "… at temperature 0.7",
}
"""Sizes with records of their own, and their columns."""

_LONG = (printed.MULTI_NEWS, printed.XSUM, printed.NEWSROOM)
_BPD_NEURAL = ("neural:1@own", "neural:1@wide", "neural:1")
_TREE, _TREE_NEURAL = (
    "medusa:8",
    (
        "medusa_neural:8:order=block@own",
        "medusa_neural:8:order=block@wide",
        "medusa_neural:8:order=block",
    ),
)

CLAIMS = [
    Claim(
        "Table 1",
        "Table 1",
        "LAMBADA has the highest block efficiency",
        "table1",
        highest(printed.LAMBADA),
    ),
    Claim(
        "Table 1",
        "Table 1",
        "MultiNews, XSum and NewsRoom have less than the others",
        "table1",
        lowest(_LONG),
    ),
    Claim(
        "Table 3",
        "§6.1",
        "2-grams lower the share of repeated neighbours on every task",
        "table3",
        repetition(TWO_GRAM, "equal"),
    ),
    Claim(
        "Table 3",
        "Table 3",
        "… and the longest run",
        "table3",
        repetition(TWO_GRAM, "longest"),
    ),
    Claim(
        "Table 4",
        "abstract",
        "16-best 4-gram drafts gain on every task",
        "table4",
        gain(FOUR_GRAM_16, each_task=True),
    ),
    Claim(
        "Table 4",
        "§7.3",
        "One draft under 4-grams gains",
        "table4",
        gain(FOUR_GRAM),
    ),
    Claim("Table 4", "§7.3", "Neural rescoring gains", "table4", gain(NEURAL)),
    Claim(
        "Table 4",
        "Table 4",
        "16-best 0-gram drafts gain",
        "table4",
        gain("zero_gram:16"),
        certain=True,
    ),
    Claim(
        "Table 4",
        "Table 4",
        "16-best 4-gram drafts beat 16-best 0-gram ones on every task",
        "table4",
        gain(FOUR_GRAM_16, "zero_gram:16", each_task=True),
    ),
    Claim(
        "Table 4",
        "Table 4 (61M)",
        "Neural rescoring beats one draft under 4-grams",
        "table4",
        gain(NEURAL, FOUR_GRAM),
    ),
    Claim(
        "Table 4",
        "§7.2",
        "16-best 4-gram drafts beat neural rescoring",
        "table4",
        gain(FOUR_GRAM_16, NEURAL),
    ),
    Claim(
        "Table 4",
        "§7.3",
        "Tasks with a low block efficiency gain most, from 16-best 4-gram drafts",
        "table4",
        weak_gain(FOUR_GRAM_16),
    ),
    Claim("Table 4", "§7.3", "… from neural rescoring", "table4", weak_gain(NEURAL)),
    Claim(
        "Table 9",
        "Table 9",
        "The largest rescorer is not the best: the middle one beats it",
        "table4",
        gain("neural:1@deep", "neural:1@wide"),
    ),
    Claim(
        "Table 5",
        "§7.3",
        "Wins repair repetition more often than the base rate (ties)",
        "table5",
        repairs,
    ),
    Claim(
        "Table 5",
        "§7.3",
        "Repair drives gains: texts with more repairs gain more",
        "table5",
        repairs_drive_gains,
    ),
    Claim(
        "Table 7",
        "§D",
        "2-grams of a task are not better than general ones by 1 %",
        "table7",
        gain(
            ("ngram:1@general_2", "ngram:1@general_2gram"),
            "ngram:1@in_domain",
            margin=1.0,
        ),
    ),
    Claim(
        "Table 7",
        "§D",
        "… nor are rescorers",
        "table7",
        gain(
            ("neural:1@general_neural", "neural:1@general_deep"),
            ("neural:1@in_domain_neural", "neural:1@in_domain_deep"),
            margin=1.0,
        ),
    ),
    Claim(
        "Table 8",
        "§E",
        "α of 4-grams is small where BPD is strong",
        "table8",
        weight_trend("ngram"),
    ),
    Claim(
        "Table 8", "§E", "… of the neural rescorer", "table8", weight_trend("neural")
    ),
    Claim(
        "Table 10",
        "§G",
        "Block efficiency grows with the heads (9 over 6)",
        "table10",
        gain("bpd", "bpd:heads=6"),
        certain=True,
    ),
    Claim(
        "Table 11",
        "§2.2",
        "16 drafts read less cache per token than BPD",
        "table11",
        lambda run: costs(run, "kv_bytes", 0.0),
    ),
    Claim(
        "Table 11",
        "§2.2, H.1",
        "… for little arithmetic: at most 10 % more",
        "table11",
        lambda run: costs(run, "flops", 10.0),
    ),
    Claim(
        "Table 12",
        "§H",
        "OpenFst finds 16 drafts in at most 2 ms",
        "table12",
        latency(2.0),
    ),
    Claim(
        "Figure 3",
        "§6.2",
        "On LAMBADA entropy rises from the first to the last head",
        "figure3",
        entropy_rises(printed.LAMBADA),
    ),
    Claim(
        "Figure 3",
        "§6.2",
        "Block efficiency rises with h_max",
        "figure3",
        entropy_trend,
    ),
    Claim(
        "Figure 6",
        "§6.3",
        "The oracle rises with k",
        "table4",
        gain("oracle", "oracle:k=2"),
        certain=True,
    ),
    Claim(
        "Figure 6",
        "Table 9",
        "Tasks with a low block efficiency have most headroom",
        "figure6",
        weak_headroom,
    ),
    Claim(
        "Figure 7",
        "Figure 7",
        "Block efficiency rises with the number of drafts",
        "figure7",
        gain(
            ("ngram:16@own_4", "ngram:16@4gram", "ngram:16"),
            ("ngram:1@own_4", "ngram:1@4gram", "ngram:1"),
        ),
        certain=True,
    ),
    Claim(
        "Table E",
        "rebuttal",
        "Rescoring raises BPD's tokens per call",
        "table_e",
        timed(_BPD_NEURAL, "bpd", speed=False),
    ),
    Claim(
        "Table E",
        "rebuttal",
        "… its speed",
        "table_e",
        timed(_BPD_NEURAL, "bpd", speed=True),
    ),
    Claim(
        "Table E",
        "rebuttal",
        "Rescoring raises the speed of Medusa's tree",
        "table_e",
        timed(_TREE_NEURAL, _TREE, speed=True),
    ),
    Claim(
        "Table E",
        "rebuttal",
        "Medusa's tree is faster than BPD",
        "table_e",
        timed(_TREE, "bpd", speed=True),
    ),
]


def rows() -> Iterator[list[str]]:
    """The cells of the table: item, claim and source, and each size."""
    runs = {}
    for claim in CLAIMS:
        row = [claim.item, f"{claim.statement} ({claim.source})"]
        for size in SIZES:
            folder = _HERE / claim.study / "results" / size
            key = claim.study, size
            if key not in runs:
                known = (folder / HEADER).is_file()
                runs[key] = open_run(folder) if known else None
            effects = claim.measure(run) if (run := runs[key]) else []
            cell = "–"
            if effects:
                words = verdict(claim, effects)
                if words in (AGREES, CONTRARY):
                    words = f"**{words}**"
                if words == BY_CONSTRUCTION:
                    words = "by construction"
                link = f"../experiments/{claim.study}/results/{size}"
                cell = f"[{words}]({link}): {summary(effects)}"
            row.append(cell)
        yield row


def table() -> str:
    """The table as Markdown."""
    header = ["item", "the paper claims", *SIZES.values()]
    lines = [header, ["---"] * len(header), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_table(page: str, made: str) -> str:
    """The page with another table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"
