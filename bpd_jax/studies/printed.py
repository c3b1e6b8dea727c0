"""The numbers that the paper prints, by table; nothing here was measured by us.

Kim, Suresh, Papineni, Riley, Kumar and Benton, "Exploring and Improving Drafts in
Blockwise Parallel Decoding", arXiv 2404.09221. Tasks have the names of
`bpd_jax.data`; a task that a table leaves out is left out here. Where the paper
contradicts itself, the docstring below the table says so. Table 6 (sizes of the models)
and Table 2 (an example) are no results. The numbers of Table E and of the rebuttal's
Tables A to D are in none of our sources.
"""

Numbers = dict[str, dict[str, float]]

LAMBADA, SQUAD, CNN_DAILYMAIL, SAMSUM, MULTI_NEWS, XSUM, NEWSROOM = TASKS = (
    "lambada",
    "squad",
    "cnn_dailymail",
    "samsum",
    "multi_news",
    "xsum",
    "newsroom",
)
"""The paper's seven tasks, in its order."""


def _by_task(columns: tuple[str, ...], rows: str) -> Numbers:
    """Reads one line of numbers per task; a dash where there is none."""
    table: Numbers = {}
    for line in rows.strip().splitlines():
        task, *cells = line.split()
        table[task] = {
            column: float(cell)
            for column, cell in zip(columns, cells, strict=True)
            if cell != "-"
        }
    return table


def column(table: Numbers, name: str) -> dict[str, float]:
    """One column of a table, by task.

    >>> column(TABLE7, "ngram_in_domain")["squad"]
    2.04
    """
    return {task: cells[name] for task, cells in table.items() if name in cells}


def mean(values: dict[str, float]) -> float:
    """Mean over tasks, as the paper's Table 11 takes it."""
    return sum(values.values()) / len(values)


METRICS = {
    LAMBADA: "perplexity",
    SQUAD: "exact_match",
    CNN_DAILYMAIL: "rougeL",
    SAMSUM: "rougeL",
    MULTI_NEWS: "rougeL",
    XSUM: "rougeL",
    NEWSROOM: "rougeL",
}
"""How Table 1 measures the quality of texts: perplexity, or a score in percent."""

TABLE1 = _by_task(
    ("quality", "bpd"),
    """
    lambada         7.88  3.12
    squad          57.60  2.08
    cnn_dailymail  39.85  1.74
    samsum         37.66  1.27
    multi_news     23.08  1.10
    xsum           52.15  1.13
    newsroom       39.85  1.08
    """,
)
"""Table 1: quality (`METRICS`) and block efficiency of BPD with nine heads.

The ROUGE-L of 39.85 is printed for two tasks, and that of 52.15 for XSum is far above
what the best models reach."""

TABLE3 = _by_task(
    ("repeated_before", "repeated_after", "run_before", "run_after"),
    """
    lambada        20.0 10.7  2.2 1.8
    squad          75.5 67.6  6.6 6.1
    cnn_dailymail  46.4 21.9  3.8 2.5
    samsum         29.9 20.0  3.1 2.5
    multi_news     33.6 14.7  3.1 2.1
    xsum           24.0  9.4  2.6 1.7
    newsroom       47.2 32.1  4.1 3.3
    """,
)
"""Table 3: equal neighbours in percent and mean longest run, before and after 2-grams.

Section 6.1 speaks of reductions of 9.9 to 24.5 points; by the table SQuAD's is 7.9 and
LAMBADA's 9.3."""

TABLE4 = _by_task(
    (
        "bpd",
        "2g",
        "3g",
        "4g",
        "32M",
        "61M",
        "94M",
        "16x0g",
        "16x4g",
        "oracle2",
        "oracle16",
    ),
    """
    lambada        3.12 3.06 3.05 3.05 3.08 3.10 3.05 3.23 3.29 3.22 3.67
    squad          2.08 2.09 2.08 2.07 2.10 2.10 2.07 2.18 2.22 2.16 2.45
    cnn_dailymail  1.74 1.73 1.73 1.73 1.73 1.73 1.73 1.82 1.83 1.84 2.26
    samsum         1.27 1.31 1.31 1.29 1.33 1.39 1.21 1.37 1.45 1.23 1.95
    multi_news     1.10 1.13 1.13 1.12 1.25 1.25 1.20 1.13 1.22 1.13 1.43
    xsum           1.13 1.17 1.17 1.16 1.18 1.23 1.17 1.18 1.26 1.17 1.55
    newsroom       1.08 1.20 1.18 1.18 1.29 1.29 1.17 1.11 1.31 1.15 1.50
    """,
)
"""Tables 4 and 9: block efficiency of BPD, of rescoring by 2-, 3- and 4-grams and by
models of 32M, 61M and 94M, of the 16 best drafts under 0-grams and 4-grams, and of the
oracle over 2 and 16 candidates.

LAMBADA's 61M is 3.10 in Table 9 and `LAMBADA_61M_TABLE4` in Table 4. SAMSum's oracle
over 2 candidates, 1.23, is below BPD's 1.27, though 2 candidates hold the first one, so
that at no position it can yield less."""

LAMBADA_61M_TABLE4 = 3.08
"""What Table 4 prints where Table 9 prints `TABLE4["lambada"]["61M"]`."""

TABLE5 = _by_task(
    (
        "ties",
        "wins",
        "wins_repair",
        "wins_regress",
        "losses",
        "losses_repair",
        "losses_regress",
    ),
    """
    lambada         631500    5804 27.95  0.05   9466  2.01  0.06
    squad           104400    1624 12.68  8.13   6325  2.53 12.28
    cnn_dailymail   965000    5928 23.20  0.67  17863  3.19  0.48
    samsum           12100    2462 17.91 23.56    867 18.57 16.72
    multi_news     1450000  294856 44.41  7.45  50209 22.21  5.37
    xsum            262000   36010 29.87  0.77   6826  4.19 10.99
    newsroom        251300   79710 66.23  0.60   6492  2.85  7.39
    """,
)
"""Table 5: token positions where refined drafts yield as much, more and less than
vanilla ones (ties are printed in thousands or millions), and among the latter two the
percentages that repair and that introduce repetition.

LAMBADA's sum is (5,153 - 100) · 128: every position of 128 tokens of each example but
100 for tuning. Section 7.3 quotes NewsRoom's 66.23 % as Multi-News's."""

TABLE7 = _by_task(
    ("ngram_general", "ngram_in_domain", "neural_general", "neural_in_domain"),
    """
    squad          2.09 2.04  2.10 2.06
    cnn_dailymail  1.73 1.73  1.73 1.72
    samsum         1.31 1.22  1.39 1.24
    multi_news     1.13 1.14  1.25 1.16
    xsum           1.17 1.18  1.23 1.14
    newsroom       1.20 1.22  1.29 1.11
    """,
)
"""Table 7: block efficiency with rescorers trained on C4 and on the task's own texts:
2-grams and the model of 61M."""

TABLE8 = _by_task(
    ("neural", "ngram"),
    """
    lambada        0.1 0.1
    squad          1.0 0.75
    cnn_dailymail  0.1 0.1
    samsum         5   1.5
    multi_news     5   2
    xsum           1.5 1.1
    newsroom       5   2
    """,
)
"""Table 8: the best weight alpha of the 94M model and of 4-grams."""

ALPHAS = (0.1, 0.5, 0.75, 0.9, 1.0, 1.1, 1.5, 2.0, 5.0, 10.0)
"""The weights that the paper tries (appendix E)."""

TABLE10 = _by_task(
    ("3", "6", "9"),
    """
    lambada        1.79 2.84 3.12
    squad          1.53 2.03 2.08
    cnn_dailymail  1.60 1.71 1.74
    samsum         1.18 1.25 1.27
    multi_news     1.08 1.08 1.10
    xsum           1.11 1.12 1.13
    newsroom       1.07 1.08 1.08
    """,
)
"""Table 10: block efficiency of BPD with 3, 6 and 9 heads."""

TABLE11 = {"bpd_parameter_gigabytes": 1.823, "autoregressive_teraflops": 0.931}
"""Table 11, per decoded token, as far as our sources quote its cells: reads of
parameters of BPD, and FLOPs of autoregressive decoding. What else is known of the table
are the formulas behind it: see `bpd_jax.evaluation.hardware`."""

TABLE11_NEURAL_EXTRA_TERAFLOPS = 0.155
"""FLOPs per decoded token by which Table 11's neural row exceeds what its own formula
gives: they follow from no sizes that the paper states."""

FIGURE2 = {"block_efficiency": 21.30, "flops": 4.04, "kv_cache": -2.54}
"""Figure 2: changes in percent of 16-best 4-gram against BPD.

The first is NewsRoom's (1.31 / 1.08), the others are those of means over seven tasks;
Table 11 gives -2.44 for the last."""

FIGURE2_KV_CACHE_BY_TABLE11 = -2.44
"""What follows from Table 11 where Figure 2 prints `FIGURE2["kv_cache"]`."""

FIGURE3_CORRELATION = 0.77
"""Figure 3b: R of block efficiency over h_max; what its points are is not said."""

TABLE12 = {1: 1.630, 2: 1.751, 4: 1.878, 8: 1.871, 16: 1.983}
"""Table 12: milliseconds to find the N best drafts of 8 steps of 16 arcs, by N."""

TABLE13 = {
    4: {2: 1.038, 4: 1.050, 8: 1.130, 16: 1.237},
    8: {2: 1.061, 4: 1.144, 8: 1.234, 16: 1.630},
    16: {2: 1.102, 4: 1.206, 8: 1.558, 16: 2.174},
}
"""Table 13: milliseconds to find the best draft, by steps, then by candidates k."""
