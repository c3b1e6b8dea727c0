"""Scores × searches: what finds good drafts under the same scores."""

import itertools
from collections.abc import Sequence

from bpd_jax.decoding.methods import NODES, Method
from bpd_jax.drafting.searches.static import BLOCK
from bpd_jax.evaluation.significance import FEWEST, side
from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Finding, Row, Table
from bpd_jax.studies.comparisons import headroom_table
from bpd_jax.studies.config import BPD, parse_contender
from bpd_jax.studies.results import (
    checked_tokens,
    contenders_of,
    drafts_of,
    efficiency,
    efficiency_cell,
    gain_cell,
    missing_cell,
    paired,
)
from bpd_jax.studies.run_files import StudyRun
from bpd_jax.studies.study import Study

WALK, EXACT, BEAM, SEVERAL, STATIC, TREE = SEARCHES = (
    "greedy walk",
    "exact 1-best",
    "beam of {}",
    "exact {}-best",
    "static tree of {}",
    "tree of {}",
)
Place = tuple[str, int]
"""One of `SEARCHES`, and how many paths or nodes it finds."""
Grid = dict[str, dict[Place, str]]
"""Contenders by score and place."""
HEADS_ALONE = "0-gram"
NAMES = {
    "zero_gram": HEADS_ALONE,
    "medusa": HEADS_ALONE,
    "ngram": "n-gram",
    "markov": "Markov head",
    "recurrent": "recurrent head",
    "hydra": "Hydra heads",
    "neural": "small LM",
    "medusa_ngram": "n-gram",
    "medusa_neural": "small LM",
}
"""Scores by kind of method, for people."""
TRAINED = ("markov", "recurrent", "hydra", "neural", "medusa_neural")
"""Scores that were trained; the others come from counts, or from the heads alone."""
NOTES = [
    "Beyond the paper. All searches choose among the same candidates of the heads, "
    "except that Hydra heads make candidates of their own.",
    "Drafts of a path are checked as one tree. `checked` is what a serial call checks: "
    "trees and P drafts are to be compared at like numbers.",
    "Scores are compared under the same search for as many drafts or nodes. Of the "
    "heads alone, whose scores do not depend on earlier tokens of a draft, the greedy "
    "walk is the best draft, and a beam of P holds the P best.",
    "A static tree ranks candidates by their scores after each path of the tree. With "
    "the block refined first, as in the paper’s slides, it ranks them by their scores "
    "along the greedy path, which takes one pass of a small LM per position over one "
    "path.",
]
_WORDED = ("search", "adaptive", "normalise", "mode", "order")
_WITHOUT_EXACT = ("neural", "recurrent", "hydra")
_SOURCE_SETTINGS = ("k", "heads", "lookup")


def search_of(method: Method) -> str:
    """How a method chooses drafts, one of `SEARCHES`.

    Scores that depend on the whole draft have no exact search over all drafts; theirs
    are those of a beam.
    """
    if method.counts == NODES:
        return TREE if method.search_name == "tree" else STATIC
    if method.search_name == "greedy":
        return WALK
    beam = method.search_name == "beam" or method.kind in _WITHOUT_EXACT
    if method.count > 1:
        return BEAM if beam else SEVERAL
    return WALK if beam else EXACT


def place_of(contender: str) -> Place:
    """The search of a contender, and for how many drafts or nodes.

    >>> place_of("ngram:64:search=best@c4_4")
    ('tree of {}', 64)
    """
    method = parse_contender(contender).method
    return search_of(method), method.count


def score_of(contender: str) -> str:
    """What a contender scores drafts with, for people."""
    found = parse_contender(contender)
    method = found.method
    name = NAMES.get(method.kind, method.kind)
    words = [
        word
        for word, given in (
            ("with the text's own bigrams", method.setting("adaptive")),
            ("normalised", method.setting("normalise")),
            ("not normalised", method.setting("normalise") == 0),
            ("parallel", method.setting("mode") == "parallel"),
            ("block refined first", method.setting("order") == BLOCK),
        )
        if given
    ]
    words += [f"{key} {value}" for key, value in method.settings if key not in _WORDED]
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
    ordered = sorted(contenders, key=_order)
    grid: Grid = {score_of(name): {} for name in contenders}
    for name in ordered:
        grid[score_of(name)][place_of(name)] = name
    return study.show(
        run,
        tables=[
            _grid_table(run, grid, list(dict.fromkeys(map(place_of, ordered)))),
            _list_table(run, contenders),
            *headroom_table(run, "searches_headroom", contenders),
        ],
        findings=[
            *_searches(run, grid),
            *_refined(run, ordered),
            *_trained(run, ordered),
        ],
        notes=NOTES,
    )


def _order(contender: str) -> tuple[int, int]:
    search, count = place_of(contender)
    return SEARCHES.index(search), count


def _grid_table(run: StudyRun, grid: Grid, used: Sequence[Place]) -> Table:
    rows = [
        Row(
            score,
            [
                efficiency_cell(drafts_of(run, row[place]))
                if place in row
                else Cell(text="–")
                for place in used
            ],
        )
        for score, row in grid.items()
    ]
    return Table(
        "searches",
        "Block efficiency over all tasks",
        "scores",
        [Column(search.format(count)) for search, count in used],
        rows,
    )


def _list_table(run: StudyRun, contenders: Sequence[str]) -> Table:
    rows = []
    for name in [BPD, *contenders]:
        # A run that was stopped has some contenders on fewer texts.
        records, base = paired(run, [name, BPD])
        calls = sum(record.calls for record in records)
        checked, gain = missing_cell(), missing_cell()
        if calls:
            checked = Cell(checked_tokens(records))
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


def _searches(run: StudyRun, grid: Grid) -> list[Finding]:
    """Under each score, one search against another."""
    findings = []
    for better, worse, statement in (
        (EXACT, WALK, "The exact best draft beats the greedy walk"),
        (SEVERAL, EXACT, "{} drafts beat the single best"),
        (SEVERAL, BEAM, "{} exact drafts beat those of a beam"),
        (TREE, SEVERAL, "A tree of {} nodes beats {} drafts"),
        (TREE, BEAM, "A tree of {} nodes beats a beam of {}"),
    ):
        for score, row in grid.items():
            for (first, mine), (second, theirs) in itertools.product(row, row):
                unlike = worse == BEAM and better == SEVERAL and mine != theirs
                if (first, second) != (better, worse) or unlike:
                    continue
                words = f"{statement.format(mine, theirs)} ({score})."
                names = row[first, mine], row[second, theirs]
                findings.append(_beats(run, words, *names))
    return findings


def _refined(run: StudyRun, contenders: Sequence[str]) -> list[Finding]:
    """Under each search, each score against those of the heads alone."""
    findings = []
    for name in contenders:
        base = _heads_alone(name, contenders)
        if base is not None:
            search, count = place_of(name)
            statement = (
                "Refined drafts beat those of the heads alone "
                f"({search.format(count)}, {score_of(name)})."
            )
            findings.append(_beats(run, statement, name, base))
    return findings


def _heads_alone(contender: str, others: Sequence[str]) -> str | None:
    """The contender that finds as many drafts or nodes, but under no other score."""
    method = parse_contender(contender).method
    if NAMES.get(method.kind) == HEADS_ALONE:
        return None
    search, count = place_of(contender)
    place = {WALK: EXACT, BEAM: SEVERAL}.get(search, search), count
    for other in others:
        base = parse_contender(other).method
        if (
            NAMES.get(base.kind) == HEADS_ALONE
            and place_of(other) == place
            and all(base.setting(x) == method.setting(x) for x in _SOURCE_SETTINGS)
        ):
            return other
    return None


def _trained(run: StudyRun, contenders: Sequence[str]) -> list[Finding]:
    """Under each search, the best trained score against the best untrained one."""
    findings = []
    for place in dict.fromkeys(map(place_of, contenders)):
        names = [name for name in contenders if place_of(name) == place]
        # A run that was stopped has some contenders on fewer texts.
        values = {
            name: efficiency(records) or 0.0
            for name, records in zip(names, paired(run, names), strict=True)
        }
        trained = [n for n in names if parse_contender(n).method.kind in TRAINED]
        untrained = [name for name in names if name not in trained]
        if trained and untrained:
            best, other = (max(t, key=values.__getitem__) for t in (trained, untrained))
            search, count = place
            statement = (
                "Trained refiners beat those that need no training "
                f"({search.format(count)}: {run.label(best)} against "
                f"{run.label(other)})."
            )
            findings.append(_beats(run, statement, best, other))
    return findings


def _beats(run: StudyRun, statement: str, first: str, second: str) -> Finding:
    """Whether one beats the other.

    That is None where the interval of the gain holds 0, or of too few texts.
    """
    mine, theirs = paired(run, [first, second])
    if not mine:
        return Finding(statement, None, "Not measured.")
    cell = gain_cell(mine, theirs)
    holds, interval = None, ""
    if cell.interval is not None:
        low, high = cell.interval
        interval = f" ({low:+.1f} … {high:+.1f})"
        holds = side(cell.interval) if len(mine) >= FEWEST else None
    return Finding(
        statement,
        holds,
        f"{efficiency(mine):.3f} against {efficiency(theirs):.3f} tokens per call, "
        f"{cell.value:+.1f} %{interval}, checking {checked_tokens(mine):.1f} against "
        f"{checked_tokens(theirs):.1f} draft tokens.",
    )


STUDY = Study(
    "searches",
    "Scores and searches",
    "Beyond the paper",
    "Refinement is a score and a search. What does a better search bring under the "
    "same score, and a better score, trained or not, under the same search?",
    present,
)
