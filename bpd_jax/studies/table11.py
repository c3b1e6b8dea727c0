"""Table 11 and Figure 2: what a decoded token costs the hardware, by formula."""

from collections.abc import Mapping
from typing import Any

from bpd_jax.evaluation.hardware import (
    CONTEXTS,
    Cost,
    ModelSize,
    cost,
    paper_sizes,
    printed_cost,
)
from bpd_jax.reporting.exhibits import (
    Cell,
    Chart,
    Column,
    Exhibit,
    Finding,
    Row,
    Series,
    Table,
)
from bpd_jax.studies import printed
from bpd_jax.studies.config import BPD, parse_contender
from bpd_jax.studies.phrases import decimal
from bpd_jax.studies.run_costs import RunCosts, costs_of
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study

LONGEST = CONTEXTS[-1]

NOTES = [
    "The paper's table as its formulas give it, decoded from its printed cells; what "
    "our sources quote of it stands beside. The FLOPs of plain decoding, "
    f"{printed.TABLE11['autoregressive_teraflops']} T, are not derived but taken over: "
    "the other FLOPs are multiples of them. The neural row's FLOPs are printed "
    f"{printed.TABLE11_NEURAL_EXTRA_TERAFLOPS} T above what the formula gives, for "
    "which no printed size accounts.",
    "The paper's cache traffic is 8 times too large: it takes the feed-forward width "
    "12288 for the width 1536 of keys and values. (It takes 1536 for the rescorer, "
    "right only if its attention heads are 128 wide.)",
    "The paper's FLOPs, 0.931 T per token of plain decoding, are as if every call ran "
    "some 1,000 tokens again, beside which the drafts hardly count. With a cache a "
    "token takes 2 FLOPs per weight, 0.003 T, and 129 draft tokens in place of 9 cost "
    "about 12 times as much per token that is decoded.",
    "The paper reads the rescorer once per call. Algorithm 2 as written reads it once "
    "per head: 2.306 GB of parameters per token, more than BPD without rescoring.",
    "The paper's Figure 2 sets NewsRoom's gain in block efficiency beside changes of "
    f"means over seven tasks; its {decimal(printed.FIGURE2['kv_cache'])} % of cache "
    f"traffic is {decimal(printed.FIGURE2_KV_CACHE_BY_TABLE11)} % by its table.",
    "Our formula: values of 2 bytes; the prefix is read once per call for all drafts, "
    "and every draft token's keys and values are written once. Drafts of the paper "
    "share nothing but their certain token; ours are counted as the distinct prefixes "
    "that were checked. N-gram models lie in the host's memory and are not counted.",
]

_ROWS = {
    "Autoregressive": None,
    "BPD": "bpd",
    "61M, sequential": "61M",
    "61M, parallel": "61M",
    "16-best 0-gram": "16x0g",
    "16-best 4-gram": "16x4g",
}
"""Rows with the column of Table 4 whose mean is their block efficiency."""

REFINED = "16-best 4-gram"


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws the paper's table, the right one, and that of the run's own model."""
    ours = costs_of(run)
    return study.show(
        run,
        tables=[_printed_table(), _right_table(), *_our_table(run, ours), _changes()],
        charts=[_chart()],
        findings=[_reproduced(), *_trade_off(ours)],
        notes=NOTES,
    )


def _mean_efficiency(row: str) -> float:
    """Of the paper's seven tasks, with Table 4's value for LAMBADA's 61M."""
    column = _ROWS[row]
    if column is None:
        return 1.0
    values = printed.column(printed.TABLE4, column)
    if column == "61M":
        values[printed.LAMBADA] = printed.LAMBADA_61M_TABLE4
    return printed.mean(values)


def _printed_cost(row: str, context: int) -> Cost:
    drafts = 0 if row == "Autoregressive" else 16 if row.startswith("16") else 1
    neural = row.startswith("61M")
    return printed_cost(_mean_efficiency(row), context, drafts=drafts, neural=neural)


def _right_cost(row: str, context: int, efficiency: float | None = None) -> Cost:
    model, rescorer = paper_sizes()
    block = model.block_size
    # Drafts share their first token, which is certain.
    nodes = 1 + 16 * (block - 1) if row.startswith("16") else block
    plain = row == "Autoregressive"
    return cost(
        model,
        context,
        efficiency=efficiency or _mean_efficiency(row),
        nodes=1 if plain else nodes,
        drafting=not plain,
        rescorer=rescorer if row.startswith("61M") else None,
        passes=1 if row.endswith("parallel") else block - 1,
    )


def _columns(flops_digits: int, kv_digits: int) -> list[Column]:
    return [
        Column("BE"),
        Column("parameters", "GB per token", 3),
        *(
            Column(f"cache, {context} tokens", "GB per token", kv_digits)
            for context in CONTEXTS
        ),
        Column(f"at {LONGEST} tokens", "TFLOPs per token", flops_digits),
    ]


def _cells(
    efficiency: float, costs: Mapping[int, Cost], paper: Mapping[str, float]
) -> list[Cell]:
    last = costs[LONGEST]
    return [
        Cell(efficiency),
        Cell(last.parameter_bytes / 1e9, paper.get("parameters")),
        *(Cell(costs[context].kv_bytes / 1e9) for context in CONTEXTS),
        Cell(last.flops / 1e12, paper.get("flops")),
    ]


def _printed_table() -> Table:
    quoted = {
        "BPD": {"parameters": printed.TABLE11["bpd_parameter_gigabytes"]},
    }
    rows = []
    for row in _ROWS:
        if row != "61M, sequential":
            costs = {context: _printed_cost(row, context) for context in CONTEXTS}
            cells = _cells(_mean_efficiency(row), costs, quoted.get(row, {}))
            rows.append(Row(row, cells))
    return Table(
        "table11",
        "The paper's table by its own formulas",
        "method",
        _columns(flops_digits=3, kv_digits=4),
        rows,
        "Block efficiency is the mean over the seven tasks. FLOPs of autoregressive "
        "decoding are taken over from the paper, where the formulas start.",
    )


def _right_table() -> Table:
    rows = []
    for row in _ROWS:
        costs = {context: _right_cost(row, context) for context in CONTEXTS}
        rows.append(Row(row, _cells(_mean_efficiency(row), costs, {})))
    model, rescorer = paper_sizes()
    total = (model.trunk_parameters + model.head_parameters) / 1e9
    return Table(
        "table11_right",
        "The same for the paper's model by the right formulas",
        "method",
        _columns(flops_digits=4, kv_digits=4),
        rows,
        f"The model has {total:.2f} billion parameters with its heads, the rescorer "
        f"{rescorer.trunk_parameters / 1e6:.1f} million. Autoregressive decoding reads "
        "no heads.",
    )


Pair = tuple[tuple[float, Cost], tuple[float, Cost]]
"""Block efficiency and cost of BPD, and of its refinement."""

_QUANTITIES = {
    "block efficiency": "block_efficiency",
    "FLOPs": "flops",
    "cache traffic": "kv_cache",
}


def _changes() -> Table:
    """Figure 2, in percent, with what it mixes set apart."""
    pairs = [
        _pair(means=True, right=False),
        _pair(means=False, right=False),
        _pair(means=True, right=True),
        _pair(means=False, right=True),
    ]
    rows = [
        Row(
            label,
            [
                Cell(_mixed(key), printed.FIGURE2[key]),
                *(Cell(_change(pair, key)) for pair in pairs),
            ],
        )
        for label, key in _QUANTITIES.items()
    ]
    columns = [
        Column("as printed", digits=1, unit="+%"),
        *(
            Column(label, group, digits=1, unit="+%")
            for group in ("by the paper's formulas", "by the right formulas")
            for label in ("seven tasks", "NewsRoom")
        ),
    ]
    return Table(
        "figure2",
        "16-best 4-gram against BPD, per decoded token",
        "quantity",
        columns,
        rows,
        f"Cache and FLOPs at {LONGEST} tokens. The first column takes NewsRoom's block "
        "efficiency and means over tasks for the rest, as the paper does.",
    )


def _pair(*, means: bool, right: bool) -> Pair:
    """The paper's model, over seven tasks or on NewsRoom, by one of the formulas."""
    found = []
    for row, drafts in (("BPD", 1), (REFINED, 16)):
        efficiency = _mean_efficiency(row)
        if not means:
            efficiency = printed.TABLE4[printed.NEWSROOM][_ROWS[row] or ""]
        if right:
            found.append((efficiency, _right_cost(row, LONGEST, efficiency)))
        else:
            found.append((efficiency, printed_cost(efficiency, LONGEST, drafts=drafts)))
    return found[0], found[1]


def _mixed(key: str) -> float:
    """As Figure 2 is made: one quantity is NewsRoom's."""
    return _change(_pair(means=key != "block_efficiency", right=False), key)


def _change(pair: Pair, key: str) -> float:
    """Change from BPD to its refinement in percent."""
    (efficiency_before, before), (efficiency_after, after) = pair
    ratio = {
        "block_efficiency": efficiency_after / efficiency_before,
        "flops": after.flops / before.flops,
        "kv_cache": after.kv_bytes / before.kv_bytes,
    }[key]
    return 100 * (ratio - 1)


def _our_table(run: StudyRun, ours: RunCosts) -> list[Table]:
    if not ours:
        return []
    sizes: dict[str, Any] = run.facts["model_sizes"]
    model = ModelSize(**sizes["model"])
    plain = {context: cost(model, context, drafting=False) for context in CONTEXTS}
    rows = [Row("Autoregressive", _cells(1.0, plain, {}))]
    rows += [
        Row(run.label(name), _cells(mean, costs, {}))
        for name, (mean, costs) in ours.items()
    ]
    ngrams = [
        f"{name or 'own'}: {count:,} n-grams"
        for name, count in sizes.get("ngrams", {}).items()
    ]
    return [
        Table(
            "table11_ours",
            "The same for the model of this run",
            "method",
            _columns(flops_digits=5, kv_digits=5),
            rows,
            "Measured block efficiency, mean over tasks, and measured draft tokens per "
            "call." + (f" N-gram models: {'; '.join(ngrams)}." if ngrams else ""),
        )
    ]


def _refined(ours: RunCosts) -> str | None:
    """The contender that stands for the paper's 16-best 4-gram."""
    names = [
        name
        for name in ours
        if parse_contender(name).method.kind.startswith("ngram")
        and parse_contender(name).method.count == 16
    ]
    return max(names, key=lambda name: ours[name][0], default=None)


def _our_pair(ours: RunCosts) -> Pair | None:
    refined = _refined(ours)
    if refined is None or BPD not in ours:
        return None
    (before, base), (after, costs) = ours[BPD], ours[refined]
    return (before, base[LONGEST]), (after, costs[LONGEST])


def _chart() -> Chart:
    """Figure 2 as bars, by the paper's formulas."""
    places = [float(place) for place in range(len(_QUANTITIES))]

    def bars(label: str, pair: Pair) -> Series:
        return Series(label, places, [_change(pair, k) for k in _QUANTITIES.values()])

    return Chart(
        "figure2",
        "16-best 4-gram against BPD, by the paper's formulas",
        "bars",
        "quantity per decoded token",
        "change in %",
        [
            Series("as printed", places, [*printed.FIGURE2.values()], dashed=True),
            bars("NewsRoom alone", _pair(means=False, right=False)),
            bars("means over seven tasks", _pair(means=True, right=False)),
        ],
        categories=list(_QUANTITIES),
    )


def _reproduced() -> Finding:
    """The quoted cell and bars against the formulas."""
    parameters = _printed_cost("BPD", LONGEST).parameter_bytes / 1e9
    quoted = printed.TABLE11["bpd_parameter_gigabytes"]
    bars = {label: (_mixed(k), printed.FIGURE2[k]) for label, k in _QUANTITIES.items()}
    close = abs(parameters / quoted - 1) <= 0.03 and all(
        abs(mine - paper) <= 0.5 for mine, paper in bars.values()
    )
    parts = [f"Reads of parameters by BPD {parameters:.3f} for {quoted:.3f} GB"] + [
        f"{label} {decimal(mine, sign=True)} for {decimal(paper, sign=True)} %"
        for label, (mine, paper) in bars.items()
    ]
    extra = printed.TABLE11_NEURAL_EXTRA_TERAFLOPS
    return Finding(
        "The cells and bars that our sources quote follow from the decoded formulas: "
        "cells to within 3 %, bars to within half a point.",
        close,
        f"{'; '.join(parts)}. Not tested: the "
        "FLOPs of plain decoding, which are taken over, and those of the neural row, "
        f"which are printed {extra} T above the formula's "
        f"{_printed_cost('61M, parallel', LONGEST).flops / 1e12:.3f} T.",
    )


def _trade_off(ours: RunCosts) -> list[Finding]:
    statement = (
        f"At {LONGEST} tokens 16-best drafts under n-grams move less cache per token "
        "than BPD's, for hardly more FLOPs (10 % at most)"
    )
    pairs: list[tuple[str, Pair | None]] = [
        ("the paper's model, by the right formulas", _pair(means=True, right=True)),
        ("this run's model, by the right formulas", _our_pair(ours)),
    ]
    findings = []
    for label, pair in pairs:
        holds, evidence = None, "Not measured."
        if pair is not None:
            gain, flops, kv = (_change(pair, k) for k in _QUANTITIES.values())
            holds = kv < 0 and flops <= 10
            evidence = (
                f"Cache traffic {decimal(kv, 1, sign=True)} %, FLOPs "
                f"{decimal(flops, 1, sign=True)} %, block efficiency "
                f"{decimal(gain, 1, sign=True)} %. The paper: "
                f"{decimal(printed.FIGURE2['kv_cache'], 1, sign=True)} % and "
                f"{decimal(printed.FIGURE2['flops'], 1, sign=True)} %."
            )
        findings.append(Finding(f"{statement}: {label}.", holds, evidence))
    return findings


STUDY = Study(
    "table11",
    "Memory traffic and arithmetic",
    "Table 11, Figure 2",
    "What does a decoded token cost in reads of parameters, traffic of the cache and "
    "FLOPs, and what does refinement change?",
    present,
)
