"""Table 11 and Figure 2: what a decoded token costs the hardware, by formula."""

from collections.abc import Callable, Mapping

from bpd_jax.evaluation.hardware import CONTEXTS, Cost, cost, paper_sizes, printed_cost
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
from bpd_jax.studies.results import decimal
from bpd_jax.studies.run_costs import Pair, RunCosts, costs_of, pair_of
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study

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
"""Rows with their names in the paper's Tables 4 and 11, the drafts of a call, and the
passes of a rescorer. The paper prints one row of the 61M rescorer, the parallel one."""

_SEQUENTIAL = "61M, sequential"
REFINED = "16-best 4-gram"


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws the paper's table, the right one, and that of the run's own model."""
    ours = costs_of(run)
    return study.show(
        run,
        tables=[_printed_table(), _right_table(), *_our_table(run, ours), _changes()],
        charts=[_chart()],
        findings=[_cells_follow(), *map(_bar, _QUANTITIES), *_trade_off(ours)],
        notes=_notes(),
    )


def _notes() -> list[str]:
    steps = _costs(_SEQUENTIAL)[LONGEST].parameter_bytes / 1e9
    return [
        "The paper prints no formulas. Those used here were recovered from the printed "
        "cells and give all of them; they stand in bpd_jax.evaluation.hardware.",
        "The paper's cache traffic is 8 times too large: it takes the feed-forward "
        "width 12288 for the width 1536 of keys and values. (It takes 1536 for the "
        "rescorer, which is right only if its attention heads are 128 wide.)",
        "The paper's FLOPs multiply the weights by one token per call, and compute the "
        "attention of all 2,048 + 9 p positions again, at twice its cost. With a "
        "cache, a token takes 2 FLOPs per weight and attends to the positions before "
        "it: 0.003 T, not 0.931 T. By the right formula 129 draft tokens in place of 9 "
        "cost about 12 times as much per decoded token.",
        "The paper reads the rescorer once per call. Algorithm 2 as written reads it "
        f"once per head: {decimal(steps, 3)} GB of parameters per token, more than BPD "
        "without rescoring.",
        "The paper's Figure 2 sets NewsRoom's gain in block efficiency beside changes "
        "of means over seven tasks.",
        "Our formula: values of 2 bytes; the prefix is read once per call for all "
        "drafts, and every draft token's keys and values are written once. Drafts of "
        "the paper share nothing but their certain token; ours are counted as the "
        "distinct prefixes that were checked. N-gram models lie in the host's memory "
        "and are not counted.",
    ]


def _efficiency(row: str) -> float:
    """The mean over seven tasks, as Table 11 prints it."""
    return printed.TABLE11[_ROWS[row][0]]["efficiency"]


def _printed_cost(row: str, context: int, efficiency: float) -> Cost:
    _, drafts, passes = _ROWS[row]
    return printed_cost(efficiency, context, drafts=drafts, passes=passes)


def _right_cost(row: str, context: int, efficiency: float) -> Cost:
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
    """By context, for the mean over seven tasks."""
    return {c: formula(row, c, _efficiency(row)) for c in CONTEXTS}


def _columns(flops_digits: int, kv_digits: int) -> list[Column]:
    return [
        Column("BE", digits=3),
        Column("parameters", "GB per token", 3),
        *(
            Column(f"cache, {context} tokens", "GB per token", kv_digits)
            for context in CONTEXTS
        ),
        Column(f"at {LONGEST} tokens", "TFLOPs per token", flops_digits),
    ]


def _values(efficiency: float, costs: Mapping[int, Cost]) -> list[float]:
    """In the order of the columns."""
    last = costs[LONGEST]
    return [
        efficiency,
        last.parameter_bytes / 1e9,
        *(costs[context].kv_bytes / 1e9 for context in CONTEXTS),
        last.flops / 1e12,
    ]


def _compared(row: str) -> list[Cell]:
    """A row of Table 11, from Table 4 and the formulas, beside what is printed."""
    name = _ROWS[row][0]
    mean = 1.0
    if name != "autoregressive":
        by_task = printed.column(printed.TABLE4, name)
        if name == "61M":
            by_task[printed.LAMBADA] = printed.LAMBADA_61M_TABLE4
        mean = printed.mean(by_task)
    cells = printed.TABLE11[name].values()
    return [Cell(*pair) for pair in zip(_values(mean, _costs(row)), cells, strict=True)]


def _printed_table() -> Table:
    return Table(
        "table11",
        "The paper's table, computed again from its own formulas",
        "method",
        _columns(flops_digits=3, kv_digits=3),
        [Row(row, _compared(row)) for row in _ROWS if row != _SEQUENTIAL],
        "Block efficiency is the mean of Table 4 over the seven tasks. The costs are "
        "divided by the block efficiency that Table 11 prints.",
    )


def _right_table() -> Table:
    rows = [
        Row(row, [*map(Cell, _values(_efficiency(row), _costs(row, _right_cost)))])
        for row in _ROWS
    ]
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


_QUANTITIES = {
    "block efficiency": "block_efficiency",
    "FLOPs": "flops",
    "cache traffic": "kv_cache",
}


def _changes() -> Table:
    """Figure 2, in percent, with what it mixes set apart."""
    both = (False, True)
    pairs = [_pair(means=not alone, right=right) for right in both for alone in both]
    rows = [
        Row(
            label,
            [
                Cell(_printed_change(key)[1], printed.FIGURE2[key]),
                *(Cell(_change(pair, key)) for pair in pairs),
            ],
        )
        for label, key in _QUANTITIES.items()
    ]
    columns = [
        Column("as printed", "from printed tables", digits=2, unit="+%"),
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
        f"Cache and FLOPs at {LONGEST} tokens. The first column is of printed cells: "
        "NewsRoom's in Table 4 for block efficiency, as Figure 2 has it, and those of "
        "Table 11 for the rest.",
    )


def _pair(*, means: bool, right: bool) -> Pair:
    """The paper's model, over seven tasks or on NewsRoom, by one of the formulas."""
    formula = _right_cost if right else _printed_cost
    newsroom = printed.TABLE4[printed.NEWSROOM]
    pairs = []
    for row in ("BPD", REFINED):
        efficiency = _efficiency(row) if means else newsroom[_ROWS[row][0]]
        pairs.append((efficiency, formula(row, LONGEST, efficiency)))
    return pairs[0], pairs[1]


def _printed_change(key: str) -> tuple[float, float, float]:
    """A bar of Figure 2 from printed cells: at least, as they stand, at most.

    The bounds take half of the last printed digit from one cell and add it to the
    other.
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
    rows = [
        Row(run.label(name), [*map(Cell, _values(*found))])
        for name, found in ours.items()
    ]
    ngrams = [
        f"{name or 'own'}: {count:,} n-grams"
        for name, count in run.facts["model_sizes"].get("ngrams", {}).items()
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


def _cells_follow() -> Finding:
    """All printed cells against Table 4 and the formulas."""
    cells = [cell for row in _printed_table().rows for cell in row.cells]
    off = [
        abs(cell.value - cell.paper)
        for cell in cells
        if cell.value is not None and cell.paper is not None
    ]
    same = sum(error < 5.01e-4 for error in off)
    return Finding(
        "Table 11: all cells follow from Table 4 and from the printed sizes of the "
        "models.",
        same == len(cells),
        f"{same} of {len(cells)} cells are the same to the last of three decimals; the "
        f"largest difference is {decimal(max(off), 4)}. That they follow does not make "
        "the formulas right: see the notes.",
    )


def _bar(label: str) -> Finding:
    """A bar of Figure 2 against the tables that it is made from."""
    key = _QUANTITIES[label]
    low, middle, high = _printed_change(key)
    paper = printed.FIGURE2[key]
    source = "Table 4" if key == "block_efficiency" else "Table 11"
    return Finding(
        f"Figure 2: the bar of {label} follows from {source}.",
        low <= paper <= high,
        f"{decimal(middle, sign=True)} for {decimal(paper, sign=True)} %. The digits "
        f"that {source} prints leave {decimal(low, sign=True)} to "
        f"{decimal(high, sign=True)} %.",
    )


def _trade_off(ours: RunCosts) -> list[Finding]:
    statement = (
        f"At {LONGEST} tokens 16-best drafts under n-grams move less cache per token "
        "than BPD's, for hardly more FLOPs (10 % at most)"
    )
    pairs: list[tuple[str, Pair | None]] = [
        ("the paper's model, by the right formulas", _pair(means=True, right=True)),
        ("this run's model, by the right formulas", pair_of(ours)),
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
