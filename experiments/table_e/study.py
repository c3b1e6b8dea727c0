"""Table E of the rebuttal: block efficiency and speed-up by task and temperature."""

import functools
from collections.abc import Callable

from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.decoding.methods import Method
from bpd_jax.drafting.searches.static import BLOCK
from bpd_jax.evaluation.statistics import FEWEST, combined_verdict
from bpd_jax.reporting.exhibits import (
    BARS,
    Cell,
    Chart,
    Column,
    Finding,
    Table,
    line_of,
)
from bpd_jax.studies.study import TIMING, Study
from bpd_jax.studies.study_records import TimingRecord
from bpd_jax.studies.tables import (
    Entry,
    Judgement,
    by_row,
    counted,
    decimal,
    finding,
    judged,
    missing_cell,
    table,
    verdict,
    with_interval,
)
from bpd_jax.studies.tasks import MT_BENCH
from experiments import printed
from experiments.refinements import is_bpd, is_tree, method_of, of_heads
from experiments.table_e.measurement import timing_records, variant_of
from experiments.table_e.timings import Tasks, Timings, base_of

_COUNTERPARTS: dict[str, Callable[[Method], bool]] = {
    "sps": lambda method: _sources(method) == ("draft_model",),
    "lookahead": lambda method: _sources(method) == ("lookahead",),
    "pld": lambda method: _sources(method) == ("lookup",),
    "bpd": is_bpd,
    "bpd_rescored": lambda method: of_heads(method, "neural") and not is_tree(method),
    "medusa": lambda method: of_heads(method) and is_tree(method),
    "medusa_rescored": lambda method: of_heads(method, "neural") and is_tree(method),
}
"""Rows of the printed Table E, and whether a method is one of a row."""


def _sources(method: Method) -> tuple[str, ...]:
    """The names of source and refiners."""
    return method.source.name, *method.refiner_names


def _table(timings: Timings, temperature: float) -> Table:
    """Block efficiency and speed-up at one temperature."""
    run = timings.run
    groups: list[tuple[str, Tasks]] = [(run.task_label(t), [t]) for t in timings.tasks]
    categories = [task for task in timings.tasks if task in MT_BENCH]
    if len(categories) > 1:
        groups.append(("MT-Bench, all", categories))
    if len(timings.tasks) > 1:
        groups.append(("All", None))
    columns: list[Entry] = []
    for group, tasks in groups:
        efficiency = functools.partial(
            timings.efficiency, temperature=temperature, tasks=tasks
        )
        speed = functools.partial(
            timings.speed, base=GREEDY.name, temperature=temperature, tasks=tasks
        )
        columns += [
            (Column("Tokens per call", group), efficiency),
            (Column("Speedup", group, unit="×"), speed),
        ]
    prompts = ", ".join(
        f"{run.task_label(task)} {timings.prompts(task, temperature)}"
        for task in timings.tasks
    )
    return table(
        f"table_e_t{temperature:g}".replace(".", ""),
        f"Block efficiency and speedup at temperature {temperature:g}",
        "Method",
        {name: timings.label(name) for name in timings.contenders(temperature)},
        columns,
        "Each refined method is listed below the method that it refines. Prompts: "
        f"{prompts}.",
    )


def _measured_counterparts(timings: Timings) -> dict[str, str]:
    """Contenders at temperature 0 that correspond to rows of the printed Table E."""
    names = [
        name
        for name in timings.contenders(0.0)
        if name != GREEDY.name
        and variant_of(name)[1] is None
        and method_of(name).lookup is None
    ]
    # The authors refine the block before Medusa's tree (slides).
    names.sort(key=lambda name: method_of(name).setting("order") != BLOCK)
    ours = {
        row: next((name for name in names if matches(method_of(name))), None)
        for row, matches in _COUNTERPARTS.items()
    }
    return {row: name for row, name in ours.items() if name is not None}


def _printed_tables(timings: Timings) -> list[Table]:
    """Table E for each of its models, with our speed-ups at temperature 0."""
    ours, rows = _measured_counterparts(timings), {}
    for method, label in printed.TABLE_E_METHODS.items():
        our_label = timings.label(ours[method]) if method in ours else label
        rows[method] = label if our_label == label else f"{label}: {our_label}"

    def entry(model: str, task: str, method: str) -> Cell:
        paper, name = printed.TABLE_E[model][method][task], ours.get(method)
        # MT-Bench may have been measured by category.
        columns = [task, *MT_BENCH] if task == "mt_bench" else [task]
        measured = [task for task in timings.tasks if task in columns]
        if name is None or not measured:
            return missing_cell(paper)
        speed = timings.speed(name, GREEDY.name, 0.0, measured)
        return Cell(speed.value, paper, speed.interval, speed.text)

    labels = ("MT-Bench", "summarization", "QA", "GSM8K", "RAG")
    tasks = dict(zip(labels, printed.TABLE_E_TASKS, strict=True))
    return [
        table(
            f"table_e_{model.lower().replace(' ', '_')}",
            f"Speed-up over plain decoding, greedy: Table E for {model}",
            "Method of Table E: ours",
            rows,
            [
                (
                    Column(label, digits=3, unit="×"),
                    functools.partial(entry, model, task),
                )
                for label, task in tasks.items()
            ],
            "Our values were measured with this run’s model and device: compare their "
            "order, not their size.",
        )
        for model in printed.TABLE_E
    ]


def _pairs(timings: Timings) -> dict[tuple[str, str], list[float]]:
    """Refined contenders with their unrefined counterparts, and the temperatures."""
    pairs: dict[tuple[str, str], list[float]] = {}
    for temperature in timings.temperatures:
        names = timings.contenders(temperature)
        for name in names:
            base = base_of(name, names)
            if base is not None:
                pairs.setdefault((name, base), []).append(temperature)
    return pairs


def _refinement_table(timings: Timings) -> list[Table]:
    pairs = _pairs(timings)

    def cells(pair: tuple[str, str]) -> list[Cell]:
        return [
            cell
            for t in timings.temperatures
            for cell in (timings.gain(*pair, t), timings.speed(*pair, t))
        ]

    columns = [
        column
        for t in timings.temperatures
        for column in (
            Column("Tokens per call", f"T = {t:g}", digits=1, unit="+%"),
            Column("Speed", f"T = {t:g}", unit="×"),
        )
    ]
    refinement = table(
        "table_e_refinement",
        "The effect of refinement",
        "Without → with refinement",
        {
            (name, base): f"{timings.label(base)} → {timings.label(name)}"
            for name, base in pairs
        },
        by_row(columns, cells),
        "Gain in tokens per call and speed-up of the refined method, over all "
        "categories.",
    )
    return [refinement] if pairs else []


def _charts(timings: Timings) -> list[Chart]:
    """All speed-ups, and the rebuttal's figure: both measures by category."""
    if not timings.tasks:
        return []
    every = [n for t in timings.temperatures for n in timings.contenders(t)]
    names = [name for name in dict.fromkeys(every) if name != GREEDY.name]
    speedups = {
        f"T = {temperature:g}": [
            timings.speed(name, GREEDY.name, temperature) for name in names
        ]
        for temperature in timings.temperatures
    }
    overall = Chart(
        "table_e_speedup",
        "Speedup over plain decoding, all categories",
        BARS,
        "method",
        "times as fast",
        [line_of(label, dict(enumerate(cells))) for label, cells in speedups.items()],
        categories=[timings.label(name) for name in names],
    )
    return [overall, *_category_charts(timings)]


def _category_charts(timings: Timings) -> list[Chart]:
    """Tokens per call and speed-up at temperature 0, of drafts with and without scores.

    By categories of MT-Bench, as in the figure of the blog and the slides; by task if
    none of them was measured.
    """
    shown = ("bpd", "bpd_rescored", "medusa", "medusa_rescored")
    ours = _measured_counterparts(timings)
    names = [ours[method] for method in shown if method in ours]
    categories = [task for task in timings.tasks if task in MT_BENCH]
    title = "by category of MT-Bench" if categories else "by task"
    tasks = categories or timings.tasks

    def speed(name: str, task: str) -> Cell:
        return timings.speed(name, GREEDY.name, 0.0, [task])

    def efficiency(name: str, task: str) -> Cell:
        return timings.efficiency(name, 0.0, [task])

    return [
        Chart(
            f"table_e_categories_{suffix}",
            f"{measure} at temperature 0, {title}",
            BARS,
            "category" if categories else "task",
            unit,
            [
                line_of(
                    timings.label(name),
                    {index: value(name, task) for index, task in enumerate(tasks)},
                )
                for name in names
            ],
            categories=categories or [timings.run.task_label(task) for task in tasks],
        )
        for suffix, measure, unit, value in (
            ("efficiency", "Block efficiency", "tokens per call", efficiency),
            ("speedup", "Speedup over plain decoding", "times as fast", speed),
        )
        if names
    ]


@finding("With exact acceptance every method produces the text of plain decoding.")
def _lossless(timings: Timings) -> Judgement | str:
    checked = [
        record
        for record in timings.run.of(TimingRecord)
        if record.identical is not None and record.contender != GREEDY.name
    ]
    if not checked:
        return "Not measured."
    differing = [record.contender for record in checked if not record.identical]
    same = len(checked) - len(differing)
    evidence = f"Identical: {same:,} of {counted(len(checked), 'text')}"
    if differing:
        names = dict.fromkeys(map(timings.run.label, differing))
        evidence += f"; the others are from {', '.join(names)}"
    return not differing, f"{evidence}."


def _refinement_findings(timings: Timings) -> list[Finding]:
    """Whether refinement yields more tokens and is faster, for every pair."""
    findings = []
    for (name, base), temperatures in _pairs(timings).items():
        pair = f"{timings.label(base)} refined: {timings.label(name)}"
        prompts = {
            t: len(sums[0].tokens)
            for t in temperatures
            if (sums := timings.sums([name, base], t)) is not None
        }
        gains = {t: timings.gain(name, base, t) for t in prompts}
        speeds = {t: timings.speed(name, base, t) for t in prompts}
        findings += [
            _above(f"{pair} yields more tokens per call", gains, prompts, percent=True),
            _above(f"{pair} is faster", speeds, prompts, percent=False),
        ]
    return findings


def _above(
    statement: str,
    cells: dict[float, Cell],
    prompts: dict[float, int],
    *,
    percent: bool,
) -> Finding:
    """Whether there is a gain at every temperature, by the intervals.

    Args:
      statement: the statement, without temperatures and full stop.
      cells: measured values by temperature; missing ones are ignored.
      prompts: numbers of prompts by temperature.
      percent: whether the values are gains in percent instead of ratios.
    """
    digits, unit, no_gain = (1, " %", 0.0) if percent else (2, "×", 1.0)
    cells = {t: cell for t, cell in cells.items() if cell.value is not None}
    parts = [
        f"{with_interval(cell, digits, unit, sign=percent)} at T = {temperature:g}, "
        f"{counted(prompts[temperature], 'prompt')}"
        f"{', too few' * (prompts[temperature] < FEWEST)}"
        for temperature, cell in cells.items()
    ]
    everywhere = " at every temperature" if len(parts) > 1 else ""
    return Finding(
        f"{statement}{everywhere}.",
        combined_verdict([verdict(c, prompts[t], no_gain) for t, c in cells.items()]),
        f"{'; '.join(parts) or 'Not measured'}.",
    )


def _printed_findings(timings: Timings) -> list[Finding]:
    """Checks claims of the rebuttal about Table E against its numbers."""
    gains = {
        (model, base, task): 100 * (rows[f"{base}_rescored"][task] / plain - 1)
        for model, rows in printed.TABLE_E.items()
        for base in ("bpd", "medusa")
        for task, plain in rows[base].items()
    }
    slower = {where: gain for where, gain in gains.items() if gain < 0}
    mean, most = sum(gains.values()) / len(gains), max(gains.values())
    fastest = max(
        rows["medusa_rescored"][task]
        for rows in printed.TABLE_E.values()
        for task in printed.TABLE_E_TASKS
    )
    evidence = (
        f"Faster in {len(gains) - len(slower)} of {len(gains)} cases, by "
        f"{decimal(mean, 1)} % on average."
    )
    for where, gain in slower.items():
        evidence += f" Not {', '.join(where)}: {decimal(gain, 1)} %."
    faster = (
        "Table E as printed: local rescoring is faster than BPD and than Medusa in "
        "every category."
    )
    times = (
        "Table E as printed: rescoring adds about 15 % (20 % in the replies), and is "
        "three times as fast as plain decoding."
    )
    judgement = (
        most >= 15 and fastest >= 3,
        f"Rescoring adds at most {decimal(most, 1)} %; rescored Medusa is at most "
        f"{decimal(fastest)} times as fast as plain decoding.",
    )
    return [judged(faster, (not slower, evidence)), judged(times, judgement)]


STUDY = Study(
    "table_e",
    "Speedup by category and temperature",
    "Table E of the rebuttal",
    "How much faster is each drafting method than plain decoding, by category and "
    "temperature, and how much does refinement add?",
    measures=(TIMING,),
    measurements={TIMING: (TimingRecord, timing_records)},
    prepare=Timings,
    tables=[
        _printed_tables,
        lambda timings: [_table(timings, t) for t in timings.temperatures],
        _refinement_table,
    ],
    charts=[_charts],
    findings=[_lossless, _refinement_findings, _printed_findings],
    notes=[
        "Table E reports greedy decoding of Vicuna 7B and 13B with four heads on one "
        "A100; its speed-ups are shown with ours at temperature 0, for the measured "
        "contender of each kind. Its categories MT-Bench, Sum, QA, GSM8K and RAG "
        "are taken to be mt_bench (or its eight categories), summarization, qa, "
        "math_reasoning and rag of Spec-Bench. A second turn follows the model’s "
        "greedy answer to the first. Sampling at temperatures 0.7 and 1 is in the "
        "rebuttal’s Tables A to D, in a PDF that is not public.",
        "Draft models, lookahead and prompt lookup do not draft from a lattice and "
        "cannot be refined. With lookup, the drafts of prompt lookup are in the same "
        "tree as refined drafts: the effect of refinement is reported only for trees "
        "that otherwise have the same nodes, search and lookup.",
        "A Medusa tree with order=block has the form of the paper’s slides: local "
        "rescoring refines the block first, and the tree is filled from the refined "
        "scores. Without it, candidates are rescored after every path of the tree, "
        "which is our form. If both were measured, Table E’s rescored Medusa is shown "
        "with the form of the slides.",
        "Prompts are decoded one at a time. Times include prefill and decoding, but "
        "not compilation. The prompts of a category are padded to one length for every "
        "contender. Contenders alternate: a speedup is plain decoding’s time per token "
        "divided by the contender’s, for the same prompts in the same rounds. "
        "Intervals resample prompts. A finding on refinement holds or fails if the "
        f"intervals exclude a gain of zero at every temperature; fewer than {FEWEST} "
        "prompts are inconclusive.",
        "Above temperature 0, exact acceptance samples every token with noise that "
        "depends only on prompt and position, so that all contenders produce the same "
        "text.",
        lambda timings: (
            ["Speculative sampling produces other texts with the same distribution."]
            if timings.has_speculative
            else []
        ),
    ],
)
