"""Scores × searches: what finds good drafts under the same scores."""

from collections.abc import Sequence

from bpd_jax.decoding.methods import NODES, Method
from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Finding, Row, Table
from bpd_jax.studies.config import BPD, parse_contender
from bpd_jax.studies.efficiency_table import MISSING, headroom_table
from bpd_jax.studies.pairing import contenders_of, paired
from bpd_jax.studies.records import DraftRecord
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.summary import (
    drafts_of,
    efficiency,
    efficiency_cell,
    gain_cell,
)

WALK, EXACT, BEAM, SEVERAL, TREE = SEARCHES = (
    "greedy walk",
    "exact 1-best",
    "beam of P",
    "exact P-best",
    "tree of M",
)
NAMES = {
    "zero_gram": "0-gram",
    "medusa": "0-gram",
    "ngram": "n-gram",
    "markov": "Markov head",
    "recurrent": "recurrent head",
    "hydra": "Hydra heads",
    "neural": "small LM",
}
"""Scores by kind of method, for people."""
TRAINED = ("markov", "recurrent", "hydra", "neural")
"""Scores that were trained; the others come from counts, or from the heads alone."""
NOTES = [
    "Beyond the paper. All searches choose among the same candidates of the heads, "
    "except that Hydra heads make candidates of their own.",
    "Drafts of a path are checked as one tree. `checked` is what a serial call checks: "
    "trees and P drafts are to be compared at like numbers.",
]


def search_of(method: Method) -> str:
    """How a method chooses drafts, one of `SEARCHES`.

    Scores that depend on the whole draft have no exact search over all drafts; theirs
    are those of a beam.
    """
    if method.counts == NODES:
        return TREE
    if method.search == "greedy":
        return WALK
    beam = method.search == "beam" or method.kind in ("neural", "recurrent", "hydra")
    if method.count > 1:
        return BEAM if beam else SEVERAL
    return WALK if beam else EXACT


def score_of(contender: str) -> str:
    """What a contender scores drafts with, for people."""
    found = parse_contender(contender)
    method = found.method
    name = NAMES.get(method.kind, method.kind)
    words = [
        word
        for word, given in (
            ("with the text's own bigrams", method.adaptive),
            ("normalised", method.normalise),
            ("not normalised", method.normalise == 0),
            ("parallel", method.mode == "parallel"),
        )
        if given
    ]
    if found.assets is not None:
        words.insert(0, found.assets.replace("_", " "))
    return f"{name}, {', '.join(words)}" if words else name


def present(study: Study, run: StudyRun) -> Exhibit:
    """Draws scores in rows and searches in columns, and what each call checks."""
    contenders = [
        name
        for name in contenders_of(run)
        if name != BPD and not name.startswith("oracle")
    ]
    grid: dict[str, dict[str, str]] = {}
    for name in contenders:
        grid.setdefault(score_of(name), {})[search_of(parse_contender(name).method)] = (
            name
        )
    used = [
        search for search in SEARCHES if any(search in row for row in grid.values())
    ]
    return study.show(
        run,
        tables=[
            _grid_table(run, grid, used),
            _list_table(run, contenders),
            *headroom_table(run, "searches_headroom", contenders),
        ],
        findings=[*_searches(run, grid), *_trained(run, contenders)],
        notes=NOTES,
    )


def _grid_table(
    run: StudyRun, grid: dict[str, dict[str, str]], used: Sequence[str]
) -> Table:
    rows = [
        Row(
            score,
            [
                efficiency_cell(drafts_of(run, row[search]))
                if search in row
                else Cell(text="–")
                for search in used
            ],
        )
        for score, row in grid.items()
    ]
    return Table(
        "searches",
        "Block efficiency over all tasks",
        "scores",
        [Column(search) for search in used],
        rows,
    )


def _list_table(run: StudyRun, contenders: Sequence[str]) -> Table:
    rows = []
    for name in [BPD, *contenders]:
        # A run that was stopped has some contenders on fewer texts.
        records, base = paired(run, [name, BPD])
        calls = sum(record.calls for record in records)
        checked, gain = MISSING, MISSING
        if calls:
            checked = Cell(_checked(records))
            gain = Cell(text="–") if name == BPD else gain_cell(records, base)
        rows.append(Row(run.label(name), [efficiency_cell(records), gain, checked]))
    return Table(
        "searches_list",
        "Every contender",
        "contender",
        [
            Column("tokens per call"),
            Column("gain over BPD", digits=1, unit="+%"),
            Column("checked", digits=1),
        ],
        rows,
    )


def _searches(run: StudyRun, grid: dict[str, dict[str, str]]) -> list[Finding]:
    findings = []
    for better, worse, statement in (
        (EXACT, WALK, "The exact best draft beats the greedy walk"),
        (SEVERAL, EXACT, "P drafts beat the single best"),
        (SEVERAL, BEAM, "P exact drafts beat those of a beam"),
        (TREE, SEVERAL, "A tree of M nodes beats P drafts"),
        (TREE, BEAM, "A tree of M nodes beats a beam"),
    ):
        findings += [
            _beats(run, f"{statement} ({score}).", row[better], row[worse])
            for score, row in grid.items()
            if better in row and worse in row
        ]
    return findings


def _beats(run: StudyRun, statement: str, first: str, second: str) -> Finding:
    """Whether one beats the other; None where the interval of the gain holds 0."""
    mine, theirs = paired(run, [first, second])
    if not mine:
        return Finding(statement, None, "Not measured.")
    cell = gain_cell(mine, theirs)
    low, high = cell.interval or (0.0, 0.0)
    holds = True if low > 0 else False if high < 0 else None
    return Finding(
        statement,
        holds,
        f"{efficiency(mine):.3f} against {efficiency(theirs):.3f} tokens per call, "
        f"{cell.value:+.1f} % ({low:+.1f} … {high:+.1f}), checking "
        f"{_checked(mine):.1f} against {_checked(theirs):.1f} draft tokens.",
    )


def _checked(records: Sequence[DraftRecord]) -> float:
    calls = sum(record.calls for record in records)
    return sum(record.nodes for record in records) / calls


def _trained(run: StudyRun, contenders: Sequence[str]) -> list[Finding]:
    """Under each search, the best trained score against the best untrained one."""
    findings = []
    for search in SEARCHES:
        best: dict[bool, tuple[float, str]] = {}
        for name in contenders:
            method = parse_contender(name).method
            value = efficiency(drafts_of(run, name))
            if value is None or _search_like(method) != search:
                continue
            key = method.kind in TRAINED
            best[key] = max(best.get(key, (value, name)), (value, name))
        if len(best) == 2:
            statement = (
                f"Trained refiners beat those that need no training ({search}: "
                f"{run.label(best[True][1])} against {run.label(best[False][1])})."
            )
            findings.append(_beats(run, statement, best[True][1], best[False][1]))
    return findings


def _search_like(method: Method) -> str:
    """The search, those that yield one draft as one and those that yield P as one."""
    search = search_of(method)
    return {WALK: EXACT, BEAM: SEVERAL}.get(search, search)


STUDY = Study(
    "searches",
    "Scores and searches",
    "",
    "Refinement is a score and a search. What does a better search bring under the "
    "same score, and a trained score under the same search?",
    present,
)
