"""Scores × searches: several searches under the same scores."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from bpd_jax.decoding.methods import NODES, Method
from bpd_jax.drafting.searches.static import BLOCK
from bpd_jax.reporting.exhibits import Cell, Column, Finding, Table
from bpd_jax.studies.comparisons import headroom_table
from bpd_jax.studies.refinements import method_of
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.study_config import BPD, parse_contender
from bpd_jax.studies.tables import (
    by_row,
    judged,
    missing_cell,
    table,
    verdict,
    with_interval,
)

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
"""Display names of scores by kind of method."""
TRAINED = ("markov", "recurrent", "hydra", "neural", "medusa_neural")
"""Scores that were trained; the others come from counts, or from the heads alone."""
_WORDED = ("search", "adaptive", "normalise", "mode", "order")
_WITHOUT_EXACT = ("neural", "recurrent", "hydra")
_SOURCE_SETTINGS = ("k", "heads", "lookup")


def search_of(method: Method) -> str:
    """The search of a method, one of `SEARCHES`.

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
    method = method_of(contender)
    return search_of(method), method.count


def score_of(contender: str) -> str:
    """The display name of the scores of a contender."""
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


class _SearchData(NamedTuple):
    """Contenders of a run but BPD and oracles, in the order of searches."""

    run: StudyRun
    contenders: list[str]
    grid: dict[str, dict[Place, str]]
    """Contenders by score and place."""


def _prepare(run: StudyRun) -> _SearchData:
    contenders = _compared(run)
    ordered = sorted(contenders, key=_order)
    grid: dict[str, dict[Place, str]] = {score_of(name): {} for name in contenders}
    for name in ordered:
        grid[score_of(name)][place_of(name)] = name
    return _SearchData(run, ordered, grid)


def _compared(run: StudyRun) -> list[str]:
    return [c for c in run.contenders if c != BPD and not c.startswith("oracle")]


def _order(contender: str) -> tuple[int, int]:
    search, count = place_of(contender)
    return SEARCHES.index(search), count


def _grid_table(data: _SearchData) -> Table:
    """Scores in rows, searches in columns."""

    def cell(place: Place, score: str) -> Cell:
        name = data.grid[score].get(place)
        return Cell(text="–") if name is None else data.run.drafts(name).cell()

    places = dict.fromkeys(map(place_of, data.contenders))
    columns = [
        (Column(search.format(count)), functools.partial(cell, (search, count)))
        for search, count in places
    ]
    rows = {score: score for score in data.grid}
    title = "Block efficiency over all tasks"
    return table("searches", title, "scores", rows, columns)


def _list_table(data: _SearchData) -> Table:
    """Every contender, and the number of draft tokens that a call verifies."""

    def cells(name: str) -> list[Cell]:
        # A run that was stopped has some contenders on fewer texts.
        drafts, base = data.run.paired([name, BPD])
        checked, gain = missing_cell(), missing_cell()
        if len(drafts):
            checked = Cell(drafts.checked)
            gain = Cell(text="–") if name == BPD else drafts.gain(base)
        return [drafts.cell(), gain, checked]

    columns = [
        Column("tokens per call"),
        Column("gain over BPD", digits=1, unit="+%"),
        Column("checked", digits=1),
    ]
    rows = {name: data.run.label(name) for name in [BPD, *_compared(data.run)]}
    title = "Every contender"
    return table("searches_list", title, "contender", rows, by_row(columns, cells))


def _searches(data: _SearchData) -> list[Finding]:
    """Under each score, one search against another."""
    findings = []
    for better, worse, statement in (
        (EXACT, WALK, "The exact best draft beats the greedy walk"),
        (SEVERAL, EXACT, "{} drafts beat the single best"),
        (SEVERAL, BEAM, "{} exact drafts beat those of a beam"),
        (TREE, SEVERAL, "A tree of {} nodes beats {} drafts"),
        (TREE, BEAM, "A tree of {} nodes beats a beam of {}"),
    ):
        for score, row in data.grid.items():
            for (first, mine), (second, theirs) in itertools.product(row, row):
                unlike = worse == BEAM and better == SEVERAL and mine != theirs
                if (first, second) != (better, worse) or unlike:
                    continue
                words = f"{statement.format(mine, theirs)} ({score})."
                names = row[first, mine], row[second, theirs]
                findings.append(_beats(data.run, words, *names))
    return findings


def _refined(data: _SearchData) -> list[Finding]:
    """Under each search, each score against those of the heads alone."""
    findings = []
    for name in data.contenders:
        base = _heads_alone(name, data.contenders)
        if base is not None:
            search, count = place_of(name)
            statement = (
                "Refined drafts beat those of the heads alone "
                f"({search.format(count)}, {score_of(name)})."
            )
            findings.append(_beats(data.run, statement, name, base))
    return findings


def _heads_alone(contender: str, others: Sequence[str]) -> str | None:
    """The contender with as many drafts or nodes under the heads' scores alone."""
    method = method_of(contender)
    if NAMES.get(method.kind) == HEADS_ALONE:
        return None
    search, count = place_of(contender)
    place = {WALK: EXACT, BEAM: SEVERAL}.get(search, search), count
    for other in others:
        base = method_of(other)
        if (
            NAMES.get(base.kind) == HEADS_ALONE
            and place_of(other) == place
            and all(base.setting(x) == method.setting(x) for x in _SOURCE_SETTINGS)
        ):
            return other
    return None


def _trained(data: _SearchData) -> list[Finding]:
    """Under each search, the best trained score against the best untrained one."""
    run, findings = data.run, []
    for search, count in dict.fromkeys(map(place_of, data.contenders)):
        names = [n for n in data.contenders if place_of(n) == (search, count)]
        # A run that was stopped has some contenders on fewer texts.
        values = {
            name: drafts.efficiency or 0.0
            for name, drafts in zip(names, run.paired(names), strict=True)
        }
        trained = [name for name in names if method_of(name).kind in TRAINED]
        untrained = [name for name in names if name not in trained]
        if trained and untrained:
            best, other = (max(t, key=values.__getitem__) for t in (trained, untrained))
            statement = (
                "Trained refiners beat those that need no training "
                f"({search.format(count)}: {run.label(best)} against "
                f"{run.label(other)})."
            )
            findings.append(_beats(run, statement, best, other))
    return findings


def _beats(run: StudyRun, statement: str, first: str, second: str) -> Finding:
    """Whether one contender beats another, by the interval of its gain."""
    mine, theirs = run.paired([first, second])
    if not len(mine):
        return judged(statement, "Not measured.")
    gain = mine.gain(theirs)
    return Finding(
        statement,
        verdict(gain, len(mine)),
        f"{mine.efficiency:.3f} against {theirs.efficiency:.3f} tokens per call, "
        f"{with_interval(gain)}, checking {mine.checked:.1f} against "
        f"{theirs.checked:.1f} draft tokens.",
    )


STUDY = Study(
    "searches",
    "Scores and searches",
    "Beyond the paper",
    "Refinement is a score and a search. What does a better search bring under the "
    "same score, and a better score, trained or not, under the same search?",
    prepare=_prepare,
    tables=[_grid_table, _list_table, lambda data: headroom_table(data.run)],
    findings=[_searches, _refined, _trained],
    notes=[
        "Beyond the paper. All searches choose among the same candidates of the "
        "heads, except that Hydra heads propose their own.",
        "Drafts are verified as one tree. `checked` counts the draft tokens that a "
        "serial call verifies: compare trees with P drafts at similar counts.",
        "Scores are compared under the same search for as many drafts or nodes. Under "
        "the heads alone, whose scores do not depend on earlier tokens of a draft, "
        "the greedy walk is the best draft, and a beam of P contains the P best.",
        "A static tree ranks candidates by their scores after each path of the tree. "
        "With the block refined first, as in the paper’s slides, it ranks them by "
        "their scores along the greedy path, which takes one pass of a small LM per "
        "position over one path.",
    ],
)
