"""Table 11 and Figure 2: hardware costs of a decoded token, computed by formula."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from bpd_jax.evaluation.token_cost import Cost, cost
from bpd_jax.reporting.exhibits import (
    BARS,
    Cell,
    Chart,
    Column,
    Finding,
    Row,
    Series,
    Table,
    line_of,
)
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.tables import (
    Entry,
    Judgement,
    decimal,
    finding,
    judged,
    table,
)
from experiments import printed
from experiments.table11.paper_costs import CONTEXTS, paper_sizes, printed_cost
from experiments.table11.run_costs import Pair, RunCosts, bpd_and_best, costs_of

LONGEST = CONTEXTS[-1]

_ROWS = {
    "Autoregressive": ("autoregressive", 0, 0),
    "BPD": ("bpd", 1, 0),
    "1-best 4-gram": ("4g", 1, 0),
    "61M, parallel": ("61M", 1, 1),
    "61M, sequential": ("61M", 1, 8),
    "16-best 0-gram": ("16x0g", 16, 0),
    "16-best 4-gram": ("16x4g", 16, 0),
}
"""Rows with their names in the paper's Tables 4 and 11, the number of drafts of a call
and of passes of the rescorer. Of the 61M rescorer the paper prints only the parallel
variant."""

_SEQUENTIAL = "61M, sequential"
REFINED = "16-best 4-gram"


class _Table11Data(NamedTuple):
    """A run and the costs of its contenders."""

    run: StudyRun
    costs: RunCosts


def _efficiency(row: str) -> float:
    """The mean over seven tasks, as Table 11 prints it."""
    return printed.TABLE11[_ROWS[row][0]]["efficiency"]


def _printed_cost(row: str, context: int, efficiency: float) -> Cost:
    _, drafts, passes = _ROWS[row]
    return printed_cost(efficiency, context, drafts=drafts, passes=passes)


def _corrected_cost(row: str, context: int, efficiency: float) -> Cost:
    _, drafts, passes = _ROWS[row]
    model, rescorer = paper_sizes()
    steps = model.block_size - 1
    return cost(
        model,
        context,
        efficiency=efficiency,
        nodes=1 + drafts * steps,  # Drafts share their first token, which is certain.
        drafting=drafts > 0,
        rescorer=rescorer if passes else None,
        passes=passes,
        rescored=steps - 1,
    )


def _costs(
    row: str, formula: Callable[[str, int, float], Cost] = _printed_cost
) -> dict[int, Cost]:
    """Costs by context length, for the mean block efficiency over seven tasks."""
    return {c: formula(row, c, _efficiency(row)) for c in CONTEXTS}


def _cost_table(
    suffix: str, title: str, rows: Mapping[str, list[Cell]], digits: int, caption: str
) -> Table:
    """A table of costs per token; parameters have three decimal places."""
    columns = [
        Column("BE", digits=3),
        Column("parameters", "GB per token", 3),
        *(Column(f"cache, {c} tokens", "GB per token", digits) for c in CONTEXTS),
        Column(f"at {LONGEST} tokens", "TFLOPs per token", digits),
    ]
    entries = [Row(label, cells) for label, cells in rows.items()]
    return Table(f"table11{suffix}", title, "method", columns, entries, caption)


def _cells(efficiency: float, costs: Mapping[int, Cost]) -> list[Cell]:
    """The cells of a row, in the order of the columns."""
    last = costs[LONGEST]
    traffic = [last.parameter_bytes, *(costs[c].kv_bytes for c in CONTEXTS)]
    return [
        Cell(efficiency),
        *(Cell(n / 1e9) for n in traffic),
        Cell(last.flops / 1e12),
    ]


def _printed_table(data: _Table11Data) -> Table:
    """Table 11, computed from Table 4 and the formulas, and as printed."""
    rows = {}
    for row, (name, *_) in _ROWS.items():
        if row == _SEQUENTIAL:
            continue
        mean = 1.0
        if name != "autoregressive":
            by_task = printed.column(printed.TABLE4, name)
            if name == "61M":
                by_task[printed.LAMBADA] = printed.LAMBADA_61M_TABLE4
            mean = printed.mean(by_task)
        paper = printed.TABLE11[name].values()
        cells = zip(_cells(mean, _costs(row)), paper, strict=True)
        rows[row] = [Cell(cell.value, number) for cell, number in cells]
    return _cost_table(
        "",
        "The paper's table, recomputed from its own formulas",
        rows,
        3,
        "Block efficiency is the mean of Table 4 over the seven tasks. The costs are "
        "divided by the block efficiency that Table 11 prints.",
    )


def _corrected_table(data: _Table11Data) -> Table:
    model, rescorer = paper_sizes()
    total = (model.trunk_parameters + model.head_parameters) / 1e9
    return _cost_table(
        "_right",
        "The same for the paper's model by the corrected formulas",
        {row: _cells(_efficiency(row), _costs(row, _corrected_cost)) for row in _ROWS},
        4,
        f"The model has {total:.2f} billion parameters including its heads, the "
        f"rescorer {rescorer.trunk_parameters / 1e6:.1f} million. Autoregressive "
        "decoding does not read the heads.",
    )


def _our_table(data: _Table11Data) -> list[Table]:
    run, costs = data
    if not costs:
        return []
    ngrams = [
        f"{name or 'own'}: {count:,} n-grams"
        for name, count in run.facts["model_sizes"].get("ngrams", {}).items()
    ]
    ours = _cost_table(
        "_ours",
        "The same for the model of this run",
        {run.label(name): _cells(*both) for name, both in costs.items()},
        5,
        "From the measured block efficiency, the mean over tasks, and the measured "
        "number of draft tokens per call."
        + (f" N-gram models: {'; '.join(ngrams)}." if ngrams else ""),
    )
    return [ours]


_QUANTITIES = {
    "block_efficiency": "block efficiency",
    "flops": "FLOPs",
    "kv_cache": "cache traffic",
}
"""Bars of Figure 2 with their labels."""


def _changes(data: _Table11Data) -> Table:
    """Figure 2 in percent, with separate columns for means and for NewsRoom."""
    columns: list[Entry] = [
        (
            Column("as printed", "from printed tables", digits=2, unit="+%"),
            lambda key: Cell(_printed_change(key)[1], printed.FIGURE2[key]),
        )
    ]
    for corrected, group in (
        (False, "by the paper's formulas"),
        (True, "by the corrected formulas"),
    ):
        for means, label in ((True, "seven tasks"), (False, "NewsRoom")):
            pair = _pair(means=means, corrected=corrected)
            column = Column(label, group, digits=1, unit="+%")
            columns.append((column, functools.partial(_change, pair)))
    return table(
        "figure2",
        "16-best 4-gram against BPD, per decoded token",
        "quantity",
        _QUANTITIES,
        columns,
        f"Cache and FLOPs at {LONGEST} tokens. The first column is computed from "
        "printed cells: those of NewsRoom in Table 4 for block efficiency, as in "
        "Figure 2, and those of Table 11 for the other quantities.",
    )


def _pair(*, means: bool, corrected: bool) -> Pair:
    """BPD and 16-best drafts of the paper's model, on seven tasks or on NewsRoom."""
    formula = _corrected_cost if corrected else _printed_cost
    newsroom = printed.TABLE4[printed.NEWSROOM]
    pairs = []
    for row in ("BPD", REFINED):
        efficiency = _efficiency(row) if means else newsroom[_ROWS[row][0]]
        pairs.append((efficiency, formula(row, LONGEST, efficiency)))
    return pairs[0], pairs[1]


def _printed_change(key: str) -> tuple[float, float, float]:
    """A bar of Figure 2 from printed cells: lower bound, value, upper bound.

    The bounds follow from the rounding of both cells by up to half of the last printed
    digit.
    """
    if key == "block_efficiency":
        cells, half = printed.TABLE4[printed.NEWSROOM], 0.005
        before, after = cells["bpd"], cells["16x4g"]
    else:
        column, half = {"flops": "flops", "kv_cache": f"kv_{LONGEST}"}[key], 0.0005
        before, after = (printed.TABLE11[row][column] for row in ("bpd", "16x4g"))
    low, middle, high = (
        100 * ((after + sign * half) / (before - sign * half) - 1)
        for sign in (-1, 0, 1)
    )
    return low, middle, high


def _change(pair: Pair, key: str) -> Cell:
    """Change from BPD to the refined method in percent."""
    (efficiency_before, before), (efficiency_after, after) = pair
    ratio = {
        "block_efficiency": efficiency_after / efficiency_before,
        "flops": after.flops / before.flops,
        "kv_cache": after.kv_bytes / before.kv_bytes,
    }[key]
    return Cell(100 * (ratio - 1))


def _chart(data: _Table11Data) -> Chart:
    """Figure 2 as bars, by the paper's formulas."""

    def bars(label: str, pair: Pair) -> Series:
        return line_of(label, {i: _change(pair, k) for i, k in enumerate(_QUANTITIES)})

    paper = dict(enumerate(printed.FIGURE2.values()))
    return Chart(
        "figure2",
        "16-best 4-gram against BPD, by the paper's formulas",
        BARS,
        "quantity per decoded token",
        "change in %",
        [
            line_of("as printed", paper, dashed=True),
            bars("NewsRoom", _pair(means=False, corrected=False)),
            bars("means over seven tasks", _pair(means=True, corrected=False)),
        ],
        categories=list(_QUANTITIES.values()),
    )


@finding(
    "Table 11: its block efficiencies are the means of Table 4, and all other cells "
    "follow from them and from the printed sizes of the models."
)
def _cells_follow(data: _Table11Data) -> Judgement:
    cells = [cell for row in _printed_table(data).rows for cell in row.cells]
    differences = [
        abs(cell.value - cell.paper)
        for cell in cells
        if cell.value is not None and cell.paper is not None
    ]
    same = sum(difference < 5.01e-4 for difference in differences)
    return (
        same == len(cells),
        f"{same} of {len(cells)} cells are equal in all three decimals; the largest "
        f"difference is {decimal(max(differences), 4)}. This does not make the "
        "formulas correct: see the notes.",
    )


def _bars(data: _Table11Data) -> list[Finding]:
    """Whether the bars of Figure 2 follow from the printed tables."""
    findings = []
    for key, label in _QUANTITIES.items():
        low, middle, high = _printed_change(key)
        paper = printed.FIGURE2[key]
        source = "Table 4" if key == "block_efficiency" else "Table 11"
        evidence = (
            f"{decimal(middle, sign=True)} % for {decimal(paper, sign=True)} %. The "
            f"rounding of {source} allows {decimal(low, sign=True)} to "
            f"{decimal(high, sign=True)} %."
        )
        statement = f"Figure 2: the bar of {label} follows from {source}."
        findings.append(Finding(statement, low <= paper <= high, evidence))
    return findings


def _trade_off(data: _Table11Data) -> list[Finding]:
    statement = (
        f"At {LONGEST} tokens, 16-best drafts under n-grams need less cache traffic "
        "per token than BPD, and at most 10 % more FLOPs"
    )
    findings = []
    for model, pair in (
        ("the paper's model", _pair(means=True, corrected=True)),
        ("this run's model", bpd_and_best(data.costs)),
    ):
        judgement: Judgement | str = "Not measured."
        if pair is not None:
            gain, flops, kv = (_change(pair, k).value or 0.0 for k in _QUANTITIES)
            judgement = (
                kv < 0 and flops <= 10,
                f"Cache traffic {decimal(kv, 1, sign=True)} %, FLOPs "
                f"{decimal(flops, 1, sign=True)} %, block efficiency "
                f"{decimal(gain, 1, sign=True)} %. The paper: "
                f"{decimal(printed.FIGURE2['kv_cache'], 1, sign=True)} % and "
                f"{decimal(printed.FIGURE2['flops'], 1, sign=True)} %.",
            )
        findings.append(
            judged(f"{statement}: {model}, by the corrected formulas.", judgement)
        )
    return findings


def _read_each_step(data: _Table11Data) -> str:
    steps = _costs(_SEQUENTIAL)[LONGEST].parameter_bytes / 1e9
    return (
        "In the paper's formula the rescorer is read once per call, as if Algorithm 2 "
        "ran in parallel. One step after another it is read once per head: "
        f"{decimal(steps, 3)} GB of parameters per token, more than BPD without "
        "rescoring."
    )


STUDY = Study(
    "table11",
    "Memory traffic and arithmetic",
    "Table 11, Figure 2",
    "How many parameter reads, how much cache traffic and how many FLOPs does a "
    "decoded token need, and how does refinement change these costs?",
    prepare=lambda run: _Table11Data(run, costs_of(run)),
    tables=[_printed_table, _corrected_table, _our_table, _changes],
    charts=[_chart],
    findings=[_cells_follow, _bars, _trade_off],
    notes=[
        "The paper does not print its formulas. Those used here were recovered from "
        "the printed cells and reproduce all of them; see "
        "experiments/table11/paper_costs.py.",
        "The paper's cache traffic is 8 times too large: it uses the feed-forward "
        "width 12288 instead of the width 1536 of keys and values. (For the rescorer "
        "it uses 1536, which is correct only if its attention heads have width 128.)",
        "In the paper's FLOPs the weights are multiplied by one token per call, and "
        "the attention of all 2,048 + 9 p positions is recomputed, at twice its cost. "
        "With a cache, a token needs 2 FLOPs per weight and attends to the positions "
        "before it: 0.003 T instead of 0.931 T. By the corrected formula, 129 draft "
        "tokens instead of 9 cost about 12 times as much per decoded token.",
        _read_each_step,
        "The paper's Figure 2 combines NewsRoom's gain in block efficiency with "
        "changes of means over seven tasks.",
        "Our formula: values have 2 bytes; the prefix is read once per call for all "
        "drafts, and the keys and values of every draft token are written once. The "
        "paper's drafts share only their certain token; for ours, the distinct "
        "prefixes that were verified are counted. N-gram models are in the host's "
        "memory and are not counted.",
    ],
)
