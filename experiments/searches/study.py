"""Compares searches under the same scores, and scores under the same search."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from bpd_jax.decoding.methods import Method
from bpd_jax.drafting.searches.static import BLOCK
from bpd_jax.reporting.exhibits import Cell, Column, Finding, Table
from bpd_jax.studies.results import StudyRun
from bpd_jax.studies.study import Study
from bpd_jax.studies.study_config import BPD, parse_contender
from bpd_jax.studies.tables import (
    by_row,
    missing_cell,
    table,
)
from experiments.comparisons import beats, headroom_table
from experiments.refinements import is_trained, is_tree, method_of, of_heads

WALK, EXACT, BEAM, SEVERAL, COVER, STATIC, TREE = SEARCHES = (
    "greedy walk",
    "exact 1-best",
    "beam of {}",
    "exact {}-best",
    "{} covering drafts",
    "static tree of {}",
    "tree of {}",
)
_NAMED = {"greedy": WALK, "cover": COVER}
SearchKey = tuple[str, int]
"""One of `SEARCHES`, and its number of paths or nodes."""
HEADS_ALONE = "0-gram"
_NAMES = {
    "ngram": "n-gram",
    "markov": "Markov head",
    "neural": "small LM",
}
"""Display names of scores by refiner or source."""
_WORDED = ("search", "adaptive", "normalise", "mode", "order")
_SOURCE_SETTINGS = ("k", "heads", "lookup")


def search_key(contender: str) -> SearchKey:
    """The search of a contender, and its number of drafts or nodes.

    Scores that depend on the complete draft have no exact search; a beam search is used
    for them.

    >>> search_key("ngram:64:search=best@c4_4")
    ('tree of {}', 64)
    """
    method = method_of(contender)
    beam = method.search_name == "beam" or not method.has_exact_search
    if is_tree(method):
        search = TREE if method.search_name == "tree" else STATIC
    elif method.search_name in _NAMED:
        search = _NAMED[method.search_name]
    elif method.count > 1:
        search = BEAM if beam else SEVERAL
    else:
        search = WALK if beam else EXACT
    return search, method.count


def score_of(contender: str) -> str:
    """The display name of the scores of a contender.

    >>> score_of("heads:3+ngram/best:16@c4_4")
    'n-gram, c4 4, heads 3'
    """
    parsed = parse_contender(contender)
    method = parsed.method
    name = _score_name(method)
    words = [
        word
        for word, applies in (
            ("with the text's own bigrams", method.setting("adaptive")),
            ("normalised", method.setting("normalise")),
            ("not normalised", method.setting("normalise") == 0),
            ("parallel", method.setting("mode") == "parallel"),
            ("block refined first", method.setting("order") == BLOCK),
        )
        if applies
    ]
    words += [f"{key} {value}" for key, value in method.settings if key not in _WORDED]
    if parsed.assets is not None:
        words.insert(0, parsed.assets.replace("_", " "))
    return f"{name}, {', '.join(words)}" if words else name


def _score_name(method: Method) -> str:
    if of_heads(method):
        return HEADS_ALONE
    named = [*method.refiner_names]
    if method.source.name != "heads":
        named.insert(0, method.source.name)
    if not {*named} <= {*_NAMES}:
        return "+".join(named)
    return " + ".join(_NAMES[name] for name in named)


class _SearchData(NamedTuple):
    """The contenders of a run except BPD and oracles.

    Attributes:
      contenders: names in the order of searches.
      grid: names by score and search.
    """

    run: StudyRun
    contenders: list[str]
    grid: dict[str, dict[SearchKey, str]]


def _prepare(run: StudyRun) -> _SearchData:
    contenders = _compared(run)
    keys = {name: search_key(name) for name in contenders}
    ordered = sorted(keys, key=lambda x: (SEARCHES.index(keys[x][0]), keys[x][1]))
    grid: dict[str, dict[SearchKey, str]] = {score_of(name): {} for name in contenders}
    for name in ordered:
        grid[score_of(name)][keys[name]] = name
    return _SearchData(run, ordered, grid)


def _compared(run: StudyRun) -> list[str]:
    return [c for c in run.contenders if c != BPD and not method_of(c).is_oracle]


def _grid_table(data: _SearchData) -> Table:
    """Scores in rows, searches in columns."""

    def cell(key: SearchKey, score: str) -> Cell:
        name = data.grid[score].get(key)
        return Cell(text="–") if name is None else data.run.drafts(name).cell()

    columns = [
        (Column(search.format(count)), functools.partial(cell, (search, count)))
        for search, count in dict.fromkeys(map(search_key, data.contenders))
    ]
    rows = {score: score for score in data.grid}
    title = "Block efficiency over all tasks"
    return table("searches", title, "scores", rows, columns)


def _list_table(data: _SearchData) -> Table:
    """All contenders, with the number of draft tokens that a call verifies."""

    def cells(name: str) -> list[Cell]:
        # An interrupted run has some contenders on fewer texts.
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
    """Compares searches under the same score."""
    findings = []
    for better, worse, statement in (
        (EXACT, WALK, "The exact best draft beats the greedy walk"),
        (SEVERAL, EXACT, "{} drafts beat the single best"),
        (COVER, SEVERAL, "{} covering drafts beat the {} best"),
        (TREE, COVER, "A tree of {} nodes beats {} covering drafts"),
        (SEVERAL, BEAM, "{} exact drafts beat those of a beam"),
        (TREE, SEVERAL, "A tree of {} nodes beats {} drafts"),
        (TREE, BEAM, "A tree of {} nodes beats a beam of {}"),
    ):
        for score, row in data.grid.items():
            for (first, count), (second, base) in itertools.product(row, row):
                if (first, second) != (better, worse):
                    continue
                if {better, worse} <= {SEVERAL, BEAM, COVER} and count != base:
                    continue
                words = f"{statement.format(count, base)} ({score})."
                names = row[first, count], row[second, base]
                findings.append(beats(data.run, words, *names))
    return findings


def _refined(data: _SearchData) -> list[Finding]:
    """Compares the drafts under each score with unrefined ones of the same search."""
    findings = []
    for name in data.contenders:
        base = _unrefined(name, data.contenders)
        if base is not None:
            search, count = search_key(name)
            statement = (
                "Refined drafts beat unrefined ones "
                f"({search.format(count)}, {score_of(name)})."
            )
            findings.append(beats(data.run, statement, name, base))
    return findings


def _unrefined(contender: str, others: Sequence[str]) -> str | None:
    """The contender with the same search under the heads' scores alone."""
    method = method_of(contender)
    if of_heads(method):
        return None
    search, count = search_key(contender)
    # Without refinement the greedy walk and the beam search are exact.
    key = {WALK: EXACT, BEAM: SEVERAL}.get(search, search), count
    for other in others:
        base = method_of(other)
        if (
            of_heads(base)
            and search_key(other) == key
            and all(base.setting(x) == method.setting(x) for x in _SOURCE_SETTINGS)
        ):
            return other
    return None


def _trained(data: _SearchData) -> list[Finding]:
    """Compares the best trained with the best untrained score, under each search."""
    run, findings = data.run, []
    for search, count in dict.fromkeys(map(search_key, data.contenders)):
        names = [n for n in data.contenders if search_key(n) == (search, count)]
        # An interrupted run has some contenders on fewer texts.
        values = {
            name: drafts.efficiency or 0.0
            for name, drafts in zip(names, run.paired(names), strict=True)
        }
        trained = [name for name in names if is_trained(method_of(name))]
        untrained = [name for name in names if name not in trained]
        if trained and untrained:
            best, other = (max(t, key=values.__getitem__) for t in (trained, untrained))
            statement = (
                "Trained refiners beat those that need no training "
                f"({search.format(count)}: {run.label(best)} against "
                f"{run.label(other)})."
            )
            findings.append(beats(run, statement, best, other))
    return findings


STUDY = Study(
    "searches",
    "Scores and searches",
    "Beyond the paper",
    "Refinement consists of a score and a search. How much does a better search gain "
    "under the same score, and a better score, trained or not, under the same search?",
    prepare=_prepare,
    tables=[_grid_table, _list_table, lambda data: headroom_table(data.run)],
    findings=[_searches, _refined, _trained],
    notes=[
        "Beyond the paper. All searches choose among the same candidates of the "
        "heads or of the block drafter.",
        "Drafts are verified as one tree. `checked` counts the draft tokens that a "
        "serial call verifies: compare trees with P drafts at similar counts.",
        "Scores are compared under the same search with as many drafts or nodes. The "
        "unrefined scores do not depend on earlier tokens of a draft, so the greedy "
        "walk is the best draft, and a beam of P contains the P best.",
        "A static tree ranks candidates by their scores after each path of the tree. "
        "With the block refined first, as in the paper’s slides, it ranks them by "
        "their scores along the greedy path, which takes one pass of a small LM per "
        "position.",
    ],
)
