"""The numbers printed in the paper and its rebuttal, by table.

Kim, Suresh, Papineni, Riley, Kumar and Benton, "Exploring and Improving Drafts in
Blockwise Parallel Decoding", arXiv 2404.09221, and the authors' reply to the reviews at
NeurIPS 2024 (Table E). Tasks have the names of `bpd_jax.data` and of Spec-Bench; tasks
that a table omits are omitted here. The docstring below a table notes contradictions
within the paper.

Table 2 (an example of decoding) has no numbers. Tables A to D of the rebuttal, which
cover sampling at temperatures 0.7 and 1, are in an attached PDF that is not public.
"""

from bpd_jax.studies.results import Numbers

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


def _read(columns: tuple[str, ...], rows: str) -> Numbers:
    """Parses a table with one line per row: a name (task or method) and numbers."""
    table: Numbers = {}
    for line in rows.strip().splitlines():
        row, *cells = line.split()
        table[row] = dict(zip(columns, map(float, cells), strict=True))
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


_ROUGE = ("rougeL", "rougeLsum_unstemmed")
METRICS = {
    LAMBADA: ("perplexity", "last_word_perplexity"),
    SQUAD: ("exact_match",),
    CNN_DAILYMAIL: _ROUGE,
    SAMSUM: _ROUGE,
    MULTI_NEWS: _ROUGE,
    XSUM: _ROUGE,
    NEWSROOM: _ROUGE,
}
"""Quality metrics of Table 1: perplexity, or a score in percent.

The paper does not say of which tokens LAMBADA's perplexity is; 7.88 fits that of last
words better. Nor does it name a variant of ROUGE-L; T5's is ROUGE-Lsum without a
stemmer. Where there are two metrics, both are shown beside the printed value."""

TABLE1 = _read(
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
the best published models."""

TABLE3 = _read(
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

Section 6.1 states reductions of 9.9 to 24.5 percentage points; by the table the
reduction is 7.9 on SQuAD and 9.3 on LAMBADA."""

TABLE4 = _read(
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

The 61M value of LAMBADA is 3.10 in Table 9 and `LAMBADA_61M_TABLE4` in Table 4. The
oracle over 2 candidates on SAMSum, 1.23, is below BPD's 1.27, although the 2 candidates
include BPD's, so that the oracle cannot yield fewer tokens at any position."""

LAMBADA_61M_TABLE4 = 3.08
"""The value in Table 4 for `TABLE4["lambada"]["61M"]`, which is that of Table 9."""

TABLE5 = _read(
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
"""Table 5: number of token positions where refined drafts yield as many, more and fewer
tokens than vanilla ones (ties are printed in thousands or millions), and, of the latter
two, the percentages that repair and that introduce repetition.

The refinement is local rescoring with the 61M model (caption and section 7.3). Section
7.3 attributes NewsRoom's 66.23 % to MultiNews."""

TABLE7 = _read(
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
"""Table 7: block efficiency with rescorers (2-grams and the 61M model) trained on C4 or
on texts of the task."""

TABLE8 = _read(
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

HEADS = 9
"""L of the paper's model (appendix C.2), head 1 included."""

TABLE10 = _read(
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

TABLE6 = _read(
    ("layers", "embedding", "hidden"),
    """
    1.5B  18  1536  12288
    32M    2   384   1536
    61M   12   384   1536
    94M    6   768   3072
    """,
)
"""Table 6: layers, width of embeddings and width of the feed-forward layer."""

TABLE11 = _read(
    ("efficiency", "parameters", "kv_128", "kv_512", "kv_1024", "kv_2048", "flops"),
    """
    autoregressive  1.000 3.000 0.113 0.453 0.906 1.812 0.931
    bpd             1.646 1.823 0.074 0.280 0.555 1.106 0.570
    4g              1.657 1.811 0.073 0.278 0.552 1.098 0.567
    61M             1.724 1.811 0.076 0.290 0.574 1.144 0.635
    16x0g           1.717 1.747 0.140 0.338 0.602 1.129 0.621
    16x4g           1.797 1.669 0.134 0.323 0.575 1.079 0.593
    """,
)
"""Table 11, per decoded token: block efficiency (mean of Table 4 over the seven tasks),
gigabytes of parameters read, gigabytes of cache traffic after 128 … 2,048 tokens, and
TFLOPs. Rows have the names of Table 4's columns; `experiments.table11.paper_costs` has
the formulas."""

FIGURE2 = {"block_efficiency": 21.30, "flops": 4.04, "kv_cache": -2.54}
"""Figure 2: changes in percent of 16-best 4-gram against BPD.

The first is NewsRoom's (1.31 / 1.08), the others are of means over seven tasks. Table
11 gives +4.04 (0.593 / 0.570) and -2.44 (1.079 / 1.106) for them."""

FIGURE3_CORRELATION = 0.77
"""Figure 3b: R of block efficiency over h_max; the paper does not define its points."""

TABLE12 = {1: 1.630, 2: 1.751, 4: 1.878, 8: 1.871, 16: 1.983}
"""Table 12: milliseconds to find the N best drafts of 8 steps of 16 arcs, by N."""

TABLE13 = {
    4: {2: 1.038, 4: 1.050, 8: 1.130, 16: 1.237},
    8: {2: 1.061, 4: 1.144, 8: 1.234, 16: 1.630},
    16: {2: 1.102, 4: 1.206, 8: 1.558, 16: 2.174},
}
"""Table 13: milliseconds to find the best draft, by steps, then by candidates k."""

TABLE_E_METHODS = {
    "sps": "Speculative sampling (Sps)",
    "lookahead": "Lookahead",
    "pld": "Prompt lookup (PLD)",
    "bpd": "BPD",
    "bpd_rescored": "BPD, local rescoring",
    "medusa": "Medusa",
    "medusa_rescored": "Medusa, local rescoring",
}
"""Rows of the rebuttal's Table E, with their labels here."""

TABLE_E_TASKS = ("mt_bench", "summarization", "qa", "math_reasoning", "rag")
"""Columns of Table E: MT-Bench, Sum, QA, GSM8K, RAG.

The rebuttal does not say where their questions come from; they are taken to be the
categories of these names in Spec-Bench."""

TABLE_E = {
    "Vicuna 7B": _read(
        TABLE_E_TASKS,
        """
        sps              1.432 1.394 1.417 1.364 1.568
        lookahead        1.818 1.645 1.503 1.865 1.475
        pld              1.676 2.707 1.162 1.605 1.909
        bpd              1.752 1.509 1.489 1.696 1.409
        bpd_rescored     1.843 1.534 1.555 1.780 1.501
        medusa           2.254 2.002 2.045 2.317 1.833
        medusa_rescored  2.482 2.076 2.114 2.357 2.000
        """,
    ),
    "Vicuna 13B": _read(
        TABLE_E_TASKS,
        """
        sps              1.417 1.424 1.362 1.448 1.606
        lookahead        1.118 1.007 1.011 1.324 0.963
        pld              1.528 2.384 1.050 1.646 1.876
        bpd              1.745 1.530 1.488 1.794 1.483
        bpd_rescored     1.819 1.522 1.519 1.819 1.501
        medusa           2.232 2.000 1.986 2.507 1.945
        medusa_rescored  2.467 2.136 2.154 2.519 2.068
        """,
    ),
}
"""Table E of the rebuttal: speed-up over autoregressive decoding, greedy, one A100.

The same text claims about 15 % over BPD and Medusa, 20 % in the replies, and "300 %"
over plain decoding; by the table rescoring adds between -0.5 and +10.5 %, and rescored
Medusa is at most 2.52 times as fast as plain decoding."""
