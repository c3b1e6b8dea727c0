"""One study as a section of the page: question, findings, tables, charts, facts."""

import re
from collections.abc import Sequence

from bpd_jax.reporting import charts, lattice, numbers
from bpd_jax.reporting.exhibits import Cell, Chart, Column, Exhibit, Finding, Table
from bpd_jax.reporting.records import Facts
from bpd_jax.reporting.wording import escaped, fact

# Of a run, but for programs: how it names things; and what stands in the notes.
_NAMES = frozenset(
    {"labels", "tasks", "printed", "left_out", "notes", "texts", "made_with"}
)
# Longer groups of facts get a line for each.
_LINE = 90
# Characters of a cell's text that make its column one of words.
_WORDS_FROM = 14
_WORDS = {True: "holds", False: "does not hold", None: "cannot be told"}
_STYLES = {True: "holds", False: "fails", None: "open"}
_SIGNS = {True: "✓", False: "✗", None: "?"}


def section(key: str, title: str, exhibit: Exhibit) -> str:
    """Returns the section of one exhibit.

    Args:
      key: its id on the page.
      title: its heading.
      exhibit: what it shows.
    """
    parts = [
        f'<p class="question">{escaped(exhibit.question)}</p>',
        findings(exhibit.findings),
        *(table(f"{key}-{each.name}", each) for each in exhibit.tables),
        _charts(exhibit.charts),
        *map(lattice.figure, exhibit.lattices),
        _notes(exhibit.remarks),
        facts(exhibit.facts),
    ]
    paper = exhibit.paper or "Beyond the paper"
    return (
        f'<section class="exhibit" aria-labelledby="{escaped(key)}">'
        f'<p class="eyebrow">{escaped(paper)}</p>'
        f'<h2 id="{escaped(key)}">{escaped(title)}</h2>{"".join(parts)}</section>'
    )


def verdict(holds: bool | None) -> str:
    """Returns the badge of a finding."""
    return (
        f'<span class="verdict {_STYLES[holds]}"><i aria-hidden="true">{_SIGNS[holds]}'
        f"</i> {_WORDS[holds]}</span>"
    )


def sign(holds: bool | None) -> str:
    """Returns the badge of a finding without its words."""
    return f'<i class="verdict {_STYLES[holds]}">{_SIGNS[holds]}</i>'


def evidence(finding: Finding) -> str:
    """Returns the numbers of a finding; a minus before one is a sign, no hyphen."""
    return escaped(re.sub(r"(?<![\w-])-(?=\d)", "−", finding.evidence))


def findings(found: Sequence[Finding]) -> str:
    """Returns the list of what was checked, or nothing if nothing was."""
    items = "".join(
        f"<li>{verdict(finding.holds)}<div><b>{escaped(finding.statement)}</b>"
        f"<p>{evidence(finding)}</p></div></li>"
        for finding in found
    )
    return f'<ul class="findings">{items}</ul>' if items else ""


def table(key: str, shown: Table) -> str:
    """Returns a table in its card, the paper's numbers below ours.

    Args:
      key: for the id of its title, which names it.
      shown: the table.
    """
    of_words = numbers.columns_of_words(shown, _WORDS_FROM)
    return (
        f'<div class="sheet card"><h3 id="{escaped(key)}">{escaped(shown.title)}</h3>'
        f'<div class="scroll" role="region" aria-labelledby="{escaped(key)}" '
        f'tabindex="0"><table class="data">{_head(shown)}<tbody>'
        + "".join(
            f'<tr{" class=strong" * row.strong}><th scope="row" class="name">'
            f"{escaped(row.label)}</th>"
            + "".join(
                _entry(cell, column, words=words)
                for cell, column, words in zip(
                    row.cells, shown.columns, of_words, strict=True
                )
            )
            + "</tr>"
            for row in shown.rows
        )
        + f"</tbody></table></div>{_caption(shown)}</div>"
    )


def _head(shown: Table) -> str:
    groups = numbers.groups(shown)
    rows = 2 if groups else 1
    of_words = numbers.columns_of_words(shown, _WORDS_FROM)
    corner = (
        f'<th scope="col" class="name" rowspan="{rows}">{escaped(shown.heading)}</th>'
    )
    labels = "".join(
        f'<th scope="col"{" class=words" * words}>{escaped(column.label)}</th>'
        for column, words in zip(shown.columns, of_words, strict=True)
    )
    if not groups:
        return f"<thead><tr>{corner}{labels}</tr></thead>"
    spans = "".join(
        f'<th scope="colgroup" colspan="{span}" class="group">'
        + (f"<span>{escaped(group)}</span>" if group else "")
        + "</th>"
        for group, span in groups
    )
    return f"<thead><tr>{corner}{spans}</tr><tr>{labels}</tr></thead>"


def _entry(cell: Cell, column: Column, *, words: bool) -> str:
    style = ""
    if words or cell.value is None:
        style = f' class="{"words" if words else "absent"}"'
    text = f"<b>{escaped(numbers.measured(cell, column))}</b>"
    if bounds := numbers.interval(cell, column):
        text += f' <small class="interval">{escaped(bounds)}</small>'
    if paper := numbers.printed(cell, column):
        text += (
            ' <small class="printed"><span class="hidden-text">paper </span>'
            f"{escaped(paper)}</small>"
        )
    return f"<td{style}>{text}</td>"


def _caption(shown: Table) -> str:
    """The sentences below a table, and what its small numbers are."""
    keys = ""
    if numbers.has_intervals(shown):
        keys += (
            '<li><small class="interval">1.40–1.60</small> '
            f"{escaped(shown.intervals)}</li>"
        )
    if numbers.has_printed(shown):
        keys += '<li><small class="printed">1.50</small> printed in the paper</li>'
    legend = f'<ul class="keys" aria-label="Legend">{keys}</ul>' if keys else ""
    caption = f"<p>{escaped(shown.caption)}</p>" if shown.caption else ""
    return f"<footer>{legend}{caption}</footer>" if legend or caption else ""


def _charts(shown: Sequence[Chart]) -> str:
    figures = "".join(
        f'<figure class="card chart{" wide" * charts.is_wide(chart)}">'
        f"<h3>{escaped(chart.title)}</h3>"
        f'<div class="scroll" role="region" aria-label="{escaped(chart.title)}" '
        f'tabindex="0">{charts.draw(chart)}</div></figure>'
        for chart in shown
        if any(series.x for series in chart.series)
    )
    alone = " alone" if len(shown) == 1 else ""
    return f'<div class="charts{alone}">{figures}</div>' if figures else ""


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escaped(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def facts(shown: Facts) -> str:
    """Returns what is known of the run, folded away."""
    pairs = "".join(
        f"<dt>{escaped(str(name))}</dt><dd>{_value(name, value)}</dd>"
        for name, value in shown.items()
        if name not in _NAMES and value not in (None, "", {}, [])
    )
    if not pairs:
        return ""
    return (
        '<details class="run"><summary>How this was run</summary>'
        f'<dl class="pairs">{pairs}</dl></details>'
    )


def plain(value: object) -> str:
    """Returns a fact in one line; of a group of them, `name value` side by side."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(each)}" for name, each in value.items())
    return fact(value)


def _value(name: str, value: object) -> str:
    text = escaped(plain(value))
    if isinstance(value, dict) and len(text) > _LINE:
        lines = (f"{inner}: {plain(each)}" for inner, each in value.items())
        text = escaped("\n".join(lines))
    if "\n" in text:
        return f'<pre tabindex="0" aria-label="{escaped(name)}">{text}</pre>'
    return f"<code>{text}</code>" if name == "command" else text
