"""Table E of the rebuttal: block efficiency and speed-up by category; temperatures."""

from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.drafting.searches.static import BLOCK
from bpd_jax.evaluation.significance import FEWEST, side, together
from bpd_jax.reporting.exhibits import (
    Cell,
    Chart,
    Column,
    Exhibit,
    Finding,
    Row,
    Table,
)
from bpd_jax.studies import printed
from bpd_jax.studies.records import TimingRecord
from bpd_jax.studies.refinements import method_of
from bpd_jax.studies.results import counted, decimal, line_of, missing_cell
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import TIMING, Study
from bpd_jax.studies.tasks import MT_BENCH
from bpd_jax.studies.timings import (
    Tasks,
    Timings,
    base_of,
    efficiency_cell,
    gain_cell,
    speed_cell,
)

_KINDS = {
    "sps": "draft_model",
    "lookahead": "lookahead",
    "pld": "prompt_lookup",
    "bpd": "bpd",
    "bpd_rescored": "neural",
    "medusa": "medusa",
    "medusa_rescored": "medusa_neural",
}
"""Rows of the printed Table E, and the kinds of methods here that do the same."""


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws Table E beside ours, one table per temperature, what refinement adds."""
    timings = Timings(run)
    return study.show(
        run,
        tables=[
            *(_printed_table(timings, model) for model in printed.TABLE_E),
            *(_table(timings, temperature) for temperature in timings.temperatures),
            *_refinement_table(timings),
        ],
        charts=[_chart(timings)] if timings.tasks else [],
        findings=[_lossless(run), *_refinement_findings(timings), *_printed_findings()],
        notes=[*_NOTES, *([_DRAWN] if timings.drawn else [])],
    )


_NOTES = (
    "Table E is about greedy decoding of Vicuna 7B and 13B, with four heads, on one "
    "A100: its speed-ups stand beside ours at temperature 0, of the contender of each "
    "kind that was measured. Its categories MT-Bench, Sum, QA, GSM8K and RAG are "
    "mt_bench (or its eight categories), summarization, qa, math_reasoning and rag of "
    "Spec-Bench. A second turn follows the model’s greedy answer to the first. "
    "Sampling at temperatures 0.7 and 1 is the subject of the rebuttal’s Tables A to "
    "D, in a PDF that is not public.",
    "Draft model, lookahead and prompt lookup draft no lattice, so that there is "
    "nothing to refine. With lookup, what prompt lookup drafts stands in the same tree "
    "as refined drafts: what refinement adds is told only of trees that otherwise have "
    "the same nodes, search and lookup.",
    "A Medusa tree with order=block is the form of the paper’s slides: local rescoring "
    "refines the block first, and the tree is filled from the refined scores. Without "
    "it, candidates are rescored after every path of the tree, which is our form. "
    "Table E’s rescored Medusa stands beside the slides’ form if both were measured.",
    "One prompt at a time. The clock runs while the prompt is read and while it is "
    "continued, not while code is compiled. Prompts of a category are padded to one "
    "length for every contender. Contenders take turns: a speedup is plain decoding’s "
    "time per token over the contender’s, of the same prompts in the same rounds. "
    "Intervals resample prompts. What is said of refinement holds or fails where they "
    f"leave out no gain at every temperature, and cannot be told of fewer than "
    f"{FEWEST} prompts.",
    "Above temperature 0, exact acceptance draws every token with noise that depends "
    "on prompt and position alone, so that all contenders write the same text.",
)
_DRAWN = "Speculative sampling writes other texts, of the same distribution."


def _table(timings: Timings, temperature: float) -> Table:
    columns = []
    places: list[tuple[str, Tasks]] = [
        (timings.run.task_label(task), [task]) for task in timings.tasks
    ]
    categories = [task for task in timings.tasks if task in MT_BENCH]
    if len(categories) > 1:
        places.append(("MT-Bench, all", categories))
    if len(timings.tasks) > 1:
        places.append(("All", None))
    for group, _ in places:
        columns += [
            Column("Tokens per call", group),
            Column("Speedup", group, unit="×"),
        ]
    rows = []
    for name in timings.contenders(temperature):
        cells = []
        for _, tasks in places:
            cells += [
                efficiency_cell(timings, name, temperature, tasks),
                speed_cell(timings, name, GREEDY.name, temperature, tasks),
            ]
        rows.append(Row(timings.label(name), cells))
    return Table(
        name=f"table_e_t{temperature:g}".replace(".", ""),
        title=f"Block efficiency and speedup at temperature {temperature:g}",
        heading="Method",
        columns=columns,
        rows=rows,
        caption="Refined methods stand below what they refine. Prompts: "
        + ", ".join(
            f"{timings.run.task_label(task)} {timings.prompts(task, temperature)}"
            for task in timings.tasks
        )
        + ".",
    )


def _printed_table(timings: Timings, model: str) -> Table:
    """Table E for one of its models, beside our speed-ups at temperature 0."""
    greedy = timings.contenders(0.0)
    rows = []
    for method, label in printed.TABLE_E_METHODS.items():
        alike = [
            name
            for name in greedy
            if name != GREEDY.name
            and method_of(name).kind == _KINDS[method]
            and method_of(name).beside is None
        ]
        # The authors refine the block before Medusa's tree (slides).
        alike.sort(key=lambda name: method_of(name).setting("order") != BLOCK)
        cells = []
        for task in printed.TABLE_E_TASKS:
            paper = printed.TABLE_E[model][method][task]
            found = None
            measured = _measured(timings, task)
            if alike and measured:
                found = speed_cell(timings, alike[0], GREEDY.name, 0.0, measured)
            if found is None or found.value is None:
                cells.append(missing_cell(paper))
            else:
                cells.append(Cell(found.value, paper, found.interval))
        mine = timings.label(alike[0]) if alike else label
        rows.append(Row(label if mine == label else f"{label}: {mine}", cells))
    return Table(
        name=f"table_e_{model.lower().replace(' ', '_')}",
        title=f"Speed-up over plain decoding, greedy: Table E for {model}",
        heading="Method of Table E: ours",
        columns=[
            Column(label, digits=3, unit="×")
            for label in ("MT-Bench", "summarization", "QA", "GSM8K", "RAG")
        ],
        rows=rows,
        caption="Ours are of this run’s model and device. Compare orders, not sizes.",
    )


def _measured(timings: Timings, task: str) -> list[str]:
    """What was measured of a column of Table E: MT-Bench may be in its categories."""
    categories = [task, *MT_BENCH] if task == "mt_bench" else [task]
    return [name for name in timings.tasks if name in categories]


def _printed_findings() -> list[Finding]:
    """What the rebuttal says of Table E, against its own numbers."""
    gains = {
        (model, base, task): 100 * (rows[f"{base}_rescored"][task] / plain - 1)
        for model, rows in printed.TABLE_E.items()
        for base in ("bpd", "medusa")
        for task, plain in rows[base].items()
    }
    slower = [where for where, gain in gains.items() if gain < 0]
    fastest = max(
        rows["medusa_rescored"][task]
        for rows in printed.TABLE_E.values()
        for task in printed.TABLE_E_TASKS
    )
    mean = sum(gains.values()) / len(gains)
    return [
        Finding(
            "Table E as printed: local rescoring is faster than BPD and than Medusa in "
            "every category.",
            not slower,
            f"Faster in {len(gains) - len(slower)} of {len(gains)} cases, by "
            f"{decimal(mean, 1)} % on average."
            + "".join(
                f" Not {', '.join(where)}: {decimal(gains[where], 1)} %."
                for where in slower
            ),
        ),
        Finding(
            "Table E as printed: rescoring adds some 15 % (20 % in the replies), and "
            "decodes three times as fast as plain decoding.",
            max(gains.values()) >= 15 and fastest >= 3,
            f"At most {decimal(max(gains.values()), 1)} %; rescored Medusa is at most "
            f"{decimal(fastest)} times as fast.",
        ),
    ]


def _pairs(timings: Timings) -> dict[tuple[str, str], list[float]]:
    """Refined contenders with what they refine, and the temperatures of both."""
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
    if not pairs:
        return []
    columns: list[Column] = []
    for temperature in timings.temperatures:
        group = f"T = {temperature:g}"
        columns += [
            Column("Tokens per call", group, digits=1, unit="+%"),
            Column("Speed", group, unit="×"),
        ]
    rows = []
    for name, base in pairs:
        cells = []
        for temperature in timings.temperatures:
            cells += [
                gain_cell(timings, name, base, temperature),
                speed_cell(timings, name, base, temperature, None),
            ]
        label = f"{timings.label(base)} → {timings.label(name)}"
        rows.append(Row(label, cells))
    return [
        Table(
            name="table_e_refinement",
            title="What refinement adds",
            heading="Without → with refinement",
            columns=columns,
            rows=rows,
            caption="Over all categories: gain in tokens per call, and how many times "
            "as fast the refined method is.",
        )
    ]


def _chart(timings: Timings) -> Chart:
    names = list(
        dict.fromkeys(
            name
            for temperature in timings.temperatures
            for name in timings.contenders(temperature)
            if name != GREEDY.name
        )
    )
    series = [
        line_of(
            f"T = {temperature:g}",
            {
                index: speed_cell(timings, name, GREEDY.name, temperature, None)
                for index, name in enumerate(names)
            },
        )
        for temperature in timings.temperatures
    ]
    return Chart(
        name="table_e_speedup",
        title="Speedup over plain decoding, all categories",
        kind="bars",
        x_label="method",
        y_label="times as fast",
        series=series,
        categories=[timings.label(name) for name in names],
    )


def _lossless(run: StudyRun) -> Finding:
    statement = "With exact acceptance every method writes plain decoding’s text."
    checked = [
        record
        for record in run.of(TimingRecord)
        if record.identical is not None and record.contender != GREEDY.name
    ]
    if not checked:
        return Finding(statement, None, "Not measured.")
    apart = [record for record in checked if not record.identical]
    same = len(checked) - len(apart)
    evidence = f"The same: {same:,} of {counted(len(checked), 'text')}"
    if apart:
        names = dict.fromkeys(run.label(record.contender) for record in apart)
        evidence += f"; others are of {', '.join(names)}"
    return Finding(statement, not apart, f"{evidence}.")


def _refinement_findings(timings: Timings) -> list[Finding]:
    findings = []
    for (name, base), temperatures in _pairs(timings).items():
        pair = f"{timings.label(base)} refined: {timings.label(name)}"
        gains = {t: gain_cell(timings, name, base, t) for t in temperatures}
        speeds = {t: speed_cell(timings, name, base, t, None) for t in temperatures}
        prompts = {
            t: len(found[0].tokens)
            for t in temperatures
            if (found := timings.sums([name, base], t)) is not None
        }
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
    """Whether what was measured is a gain, by its intervals.

    Args:
      statement: without temperatures and full stop.
      cells: by temperature; those that were not measured do not count.
      prompts: by temperature.
      percent: whether cells hold gains in percent, or ratios.
    """
    digits, unit, nothing = (1, " %", 0.0) if percent else (2, "×", 1.0)
    verdicts, parts = [], []
    for temperature, cell in cells.items():
        if cell.value is None:
            continue
        words = f"{decimal(cell.value, digits, sign=percent)}{unit}"
        few = prompts[temperature] < FEWEST
        verdict = None
        if cell.interval is not None:
            verdict = None if few else side(cell.interval, nothing)
            low, high = (decimal(end, digits, sign=percent) for end in cell.interval)
            words += f" ({low} … {high})"
        verdicts.append(verdict)
        parts.append(
            f"{words} at T = {temperature:g}, "
            f"{counted(prompts[temperature], 'prompt')}{', too few' * few}"
        )
    everywhere = " at every temperature" if len(parts) > 1 else ""
    return Finding(
        f"{statement}{everywhere}.",
        together(verdicts),
        f"{'; '.join(parts) or 'Not measured'}.",
    )


STUDY = Study(
    name="table_e",
    title="Speedup by category and temperature",
    paper="Table E of the rebuttal",
    question=(
        "How much faster is each drafting method than plain decoding, by category and "
        "temperature, and what does refinement add?"
    ),
    present=present,
    measures=(TIMING,),
)
