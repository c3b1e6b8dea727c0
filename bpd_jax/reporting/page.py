"""Exhibits as one self-contained HTML page, with a table of their runs.

It renders the studies' page and the report of one evaluation. Jinja2 escapes every
value in a template, including control characters, and the page's content security
policy allows no network access and only the page's own script.
"""

import base64
import dataclasses
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from bpd_jax.reporting import cell_text, charts, explorer, lattice_drawing
from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Row, Table
from bpd_jax.reporting.explorer import ExplorerText
from bpd_jax.reporting.formatting import fact
from bpd_jax.reporting.glossary import TERMS
from bpd_jax.reporting.templates import environment, resource
from bpd_jax.storage import files

SUMMARY, EXPLORER = "summary", "explorer-title"
# Above this number, statements are collapsed by exhibit.
_SHOWN = 12
# Longer dicts of facts have one line per entry.
_LINE = 90
# A column of texts is left-aligned if one has more characters.
_WORDS_FROM = 14
# Facts that only programs read, and those that are in the notes.
_HIDDEN_FACTS = frozenset(
    {"labels", "tasks", "printed", "left_out", "notes", "texts", "made_with"}
)

# Columns of the table of runs, by setting.
_SETTINGS = {
    "max_new_tokens": "new tokens ≤",
    "longest_prompt": "prompt, truncated ≤",
    "longest_whole": "prompt, whole ≤",
    "lattice_width": "candidates",
}
_Counts = dict[str, Mapping[str, int]]


@dataclasses.dataclass(frozen=True)
class KeyFigure:
    """One of the most important numbers, at the top of the page."""

    name: str
    value: str
    note: str


@dataclasses.dataclass(frozen=True)
class PagePart:
    """An exhibit as a section of the page.

    Attributes:
      key: its unique id.
      size: size of the run, such as `smollm2`, if there are several; otherwise "".
    """

    key: str
    exhibit: Exhibit
    size: str = ""

    @property
    def title(self) -> str:
        """The heading of its section."""
        return (
            f"{self.exhibit.title} · {self.size}" if self.size else self.exhibit.title
        )


@dataclasses.dataclass(frozen=True)
class Page:
    """The contents of a page.

    Attributes:
      title: heading of the page.
      created: ISO date.
      parts: exhibits in their order.
      figures: a few key figures.
      texts: texts of the draft explorer.
      meta: model, device and date; by default from the exhibits' facts.
      terms: explanations of terms on the page.
    """

    title: str
    created: str
    parts: list[PagePart]
    figures: list[KeyFigure] = dataclasses.field(default_factory=list)
    texts: list[ExplorerText] = dataclasses.field(default_factory=list)
    meta: str = ""
    terms: Mapping[str, str] = dataclasses.field(default_factory=lambda: TERMS)


def write_page(page: Page, path: str | os.PathLike[str]) -> None:
    """Writes the page; the file is replaced only when the new one is complete."""
    # Other line ends than "\n" would change the script, and with it its digest.
    files.write_text(path, render(page))


def render(page: Page) -> str:
    """Returns the page as HTML."""
    script = resource("contents.js") + resource("explorer.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    common_facts = {
        name: "; ".join(values)
        for name in ("model", "device", "date", "versions")
        if (values := _distinct(page, name))
    }
    runs = run_table([part.exhibit for part in page.parts])
    counts = statement_counts(page)
    entries = [(SUMMARY, "Summary", "")] if counts or runs else []
    entries += [(part.key, part.title, part.exhibit.paper) for part in page.parts]
    entries += [(EXPLORER, "Draft explorer", "")] if page.texts else []
    dates = sorted(_distinct(page, "date"))
    groups = itertools.groupby(enumerate(page.texts), lambda pair: pair[1].group)
    return (
        _environment()
        .get_template("page.html")
        .render(
            page=page,
            meta=page.meta
            or " · ".join(
                [
                    *_distinct(page, "model"),
                    *_distinct(page, "device"),
                    *dict.fromkeys(dates[:1] + dates[-1:]),
                ]
            ),
            lead=counts,
            entries=entries,
            known=common_facts,
            runs=runs,
            folded=sum(len(part.exhibit.findings) for part in page.parts) > _SHOWN,
            summary_id=SUMMARY,
            explorer_id=EXPLORER,
            text_groups=[(group, list(texts)) for group, texts in groups],
            texts_json=Markup(explorer.to_json(page.texts)),
            lattices=any(text.candidates for text in page.texts),
            style=Markup(
                "".join(map(resource, ("base.css", "charts.css", "page.css")))
            ),
            script=Markup(script),
            script_hash=f"sha256-{digest}",
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    derived = environment().overlay()
    derived.filters = derived.filters | {
        "measured": cell_text.measured,
        "interval": cell_text.interval,
        "printed": cell_text.printed,
        "groups": cell_text.groups,
        "columns_of_words": lambda table: cell_text.columns_of_words(
            table, _WORDS_FROM
        ),
        "has_intervals": cell_text.has_intervals,
        "has_printed": cell_text.has_printed,
        "draw_chart": charts.draw,
        "draw_lattice": lattice_drawing.figure,
        "run_facts": run_facts,
        # Hyphens before numbers become minus signs.
        "signed": functools.partial(re.sub, r"(?<![\w-])-(?=\d)", "−"),
    }
    derived.tests = derived.tests | {
        "wide": charts.is_wide,
        "has_points": charts.has_points,
    }
    return derived


def statement_counts(page: Page) -> str:
    """Numbers of statements on tables and figures by verdict; "" without any."""
    exhibits = [part.exhibit for part in page.parts]
    of_paper = [e for e in exhibits if e.paper.startswith(("Table", "Figure"))]
    verdicts = [finding.holds for e in of_paper for finding in e.findings]
    labels = {True: "hold", False: "do not hold", None: "inconclusive"}
    counts = {label: verdicts.count(holds) for holds, label in labels.items()}
    listed = " · ".join(f"{count} {label}" for label, count in counts.items() if count)
    return f"Statements of the paper: {listed}" if listed else ""


def _distinct(page: Page, name: str) -> list[str]:
    """The distinct values of one fact over all runs."""
    values = [part.exhibit.facts.get(name) for part in page.parts]
    return list(dict.fromkeys(fact(value) for value in values if value))


def run_facts(exhibit: Exhibit) -> dict[str, tuple[str, str]]:
    """Facts of a run by name, each with its text and kind: `code`, `lines` or ""."""
    facts = {}
    for name, value in exhibit.facts.items():
        if name in _HIDDEN_FACTS or value in (None, "", {}, []):
            continue
        text, kind = fact(value), "code" if name == "command" else ""
        if isinstance(value, dict) and len(text) > _LINE:
            text = "\n".join(f"{inner}: {fact(each)}" for inner, each in value.items())
        facts[str(name)] = (text, "lines" if "\n" in text else kind)
    return facts


def run_table(exhibits: Sequence[Exhibit]) -> Table | None:
    """One row per size of run; several if the studies of a size differ.

    Returns:
      None if no exhibit has facts of a run.
    """
    # A row has the texts of all studies with its settings, by task.
    rows: list[tuple[tuple[Any, ...], _Counts, list[str]]] = []
    for exhibit in exhibits:
        facts = exhibit.facts
        counts: _Counts = facts.get("examples") or {}
        settings = facts.get("settings") or {}
        if not counts:
            continue
        common = (
            facts.get("size") or exhibit.title,
            facts.get("model"),
            facts.get("trunk"),
            "block drafter" if settings.get("source") == "block" else "heads",
            facts.get("heads"),
            *map(settings.get, _SETTINGS),
        )
        for key, known, titles in rows:
            if key == common and all(
                counts[t] == known.get(t, counts[t]) for t in counts
            ):
                known.update(counts)
                titles.append(exhibit.paper or exhibit.title)
                break
        else:
            rows.append((common, {**counts}, [exhibit.paper or exhibit.title]))
    if not rows:
        return None
    return Table(
        "runs",
        "Runs",
        "Size",
        [
            *(Column(label) for label in ("studies", "model", "trunk", "drafts of")),
            Column("L", digits=0),
            Column("reported", "texts", digits=0),
            Column("tuning", "texts", digits=0),
            Column("tasks", "texts", digits=0),
            *(Column(label, "tokens", digits=0) for label in _SETTINGS.values()),
        ],
        [
            _row(*row, among=[key[0] for key, *_ in rows[:n]])
            for n, row in enumerate(rows)
        ],
        "Studies: the other rows of a size name theirs. Texts are drawn with a fixed "
        "random seed; the documents of prompts are truncated, or texts are whole. "
        "Candidates are those of each position.",
    )


def _row(
    common: tuple[Any, ...], counts: _Counts, titles: list[str], *, among: list[Any]
) -> Row:
    size, model, trunk, source, length, *settings = common
    # All rows of a size but the first one name their studies.
    studies = ", ".join(titles) if size in among else str(len(titles))
    numbers = (
        length,
        sum(parts.get("report", 0) for parts in counts.values()),
        sum(parts.get("tune", 0) for parts in counts.values()),
        len(counts),
        *settings,
    )
    return Row(
        str(size),
        [
            *(Cell(text=str(text or "")) for text in (studies, model, trunk, source)),
            *(Cell(number) for number in numbers),
        ],
    )
