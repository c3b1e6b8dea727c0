"""Scores × searches: what finds good drafts under the same scores."""

from collections.abc import Sequence

from bpd_jax.decoding.methods import NODES, Method
from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Finding, Row, Table
from bpd_jax.studies.config import BPD, parse_contender
from bpd_jax.studies.efficiency_table import MISSING, headroom_table
from bpd_jax.studies.pairing import contenders_of, paired
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
    return Exhibit(
        study.name,
        study.title,
        study.paper,
        study.question,
        tables=[
            _grid_table(run, grid, used),
            _list_table(run, contenders),
            *headroom_table(run, "searches_headroom", contenders),
        ],
        findings=[*_searches(run, grid), _trained(run, contenders)],
        notes=NOTES,
        facts=run.facts,
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
            checked = Cell(sum(record.nodes for record in records) / calls)
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
        for score, row in grid.items():
            if better not in row or worse not in row:
                continue
            words = f"{statement} ({score})."
            first, second = (
                efficiency(drafts_of(run, row[search])) for search in (better, worse)
            )
            if first is None or second is None:
                findings.append(Finding(words, None, "Not measured."))
                continue
            evidence = f"{first:.3f} against {second:.3f} tokens per call."
            findings.append(Finding(words, first > second, evidence))
    return findings


def _trained(run: StudyRun, contenders: Sequence[str]) -> Finding:
    """Whether what needs training beats what does not."""
    statement = "Trained refiners beat those that need no training."
    best: dict[bool, tuple[float, str]] = {}
    for name in contenders:
        value = efficiency(drafts_of(run, name))
        trained = parse_contender(name).method.kind in TRAINED
        if value is not None:
            found = (value, run.label(name))
            best[trained] = max(best.get(trained, found), found)
    if len(best) < 2:
        return Finding(statement, None, "Not measured.")
    return Finding(
        statement,
        best[True][0] > best[False][0],
        f"The best of each: {best[True][1]} {best[True][0]:.3f}, {best[False][1]} "
        f"{best[False][0]:.3f} tokens per call.",
    )


STUDY = Study(
    "searches",
    "Scores and searches",
    "",
    "Refinement is a score and a search. What does a better search bring under the "
    "same score, and a trained score under the same search?",
    present,
)
