"""An exhibit's tables as LaTeX for pdflatex and as CSV, written by pandas."""

import re

from bpd_jax.reporting import cell_text
from bpd_jax.reporting.exhibits import Cell, Column, Row, Table
from bpd_jax.reporting.formatting import readable

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "−": "$-$",
    "–": "--",
    "—": "---",
    "…": r"\dots{}",
    "‘": "`",
    "’": "'",
    "“": "``",
    "”": "''",
    "⟦": r"$[\![$",
    "⟧": r"$]\!]$",
    "∅": r"$\emptyset$",
    "⏎": r"$\hookleftarrow$",
    "⇥": r"$\mapsto$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "→": r"$\to$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "α": r"$\alpha$",
    "²": r"$^2$",
    "⁸": r"$^8$",
    "\n": " ",
}
_PARTS = ("", " low", " high", " paper", " text")
_PACKAGES = (
    "% Needs a LaTeX of 2020 or later and these packages:\n"
    "%   \\usepackage[T1]{fontenc}\n"
    "%   \\usepackage{booktabs}\n"
    "%   \\usepackage{graphicx}\n"
    "% \\codepoint stands for a character that pdflatex lacks. xelatex and lualatex\n"
    "% show it, by a font that has it, after this in the preamble:\n"
    '%   \\newcommand{\\codepoint}[1]{\\char"#1 }'
)
_COMMANDS = (
    r"\providecommand{\interval}[1]{{\scriptsize [#1]}}"
    "\n"
    r"\providecommand{\printed}[1]{{\scriptsize\itshape (#1)}}"
    "\n"
    r"\providecommand{\codepoint}[1]{{\scriptsize U+#1}}"
)


def escape(text: str) -> str:
    r"""Escapes text for LaTeX.

    >>> escape("50 % of a_b")
    '50 \\% of a\\_b'
    """
    # Adjacent hyphens would become a dash.
    return re.sub(r"-+|[^-]", _escaped, readable(text))


def _escaped(match: re.Match[str]) -> str:
    """Escapes a run of hyphens or one character; beyond Latin-1 by its code point."""
    text = match[0]
    if text.startswith("-"):
        return "{}".join(text)
    if text not in _SPECIAL and ord(text) > 0xFF:
        return rf"\codepoint{{{ord(text):04X}}}"
    return _SPECIAL.get(text, text)


def table_latex(table: Table, label: str) -> str:
    r"""Returns a `table` environment.

    Intervals and the paper's numbers have a smaller font, from the commands `\interval`
    and `\printed`, which a document may redefine. A table that is wider than the text
    is scaled down.

    Args:
      label: label for references, after `tab:`.
    """
    caption = f"{table.title}. {table.caption}".strip()
    if cell_text.has_intervals(table):
        caption += f" In brackets: {table.intervals}."
    if cell_text.has_printed(table):
        caption += " In italics: values printed in the paper."
    tabular = _tabular(table).replace("\n", "\n  ").rstrip()
    return "\n".join(
        [
            _PACKAGES,
            _COMMANDS,
            r"\begin{table}[t]",
            r"  \centering",
            rf"  \caption{{{escape(caption)}}}",
            rf"  \label{{tab:{label}}}",
            r"  \resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            f"  {tabular}}}",
            r"\end{table}",
            "",
        ]
    )


def _tabular(table: Table) -> str:
    """The `tabular` environment, with rules below groups and above summaries."""
    import pandas as pd

    words = cell_text.columns_of_words(table)
    columns = [("", escape(table.heading))]
    columns += [(escape(each.group), escape(each.label)) for each in table.columns]
    groups = cell_text.groups(table)
    frame = pd.DataFrame(
        [_row(row, table) for row in table.rows],
        columns=pd.MultiIndex.from_tuples(columns)
        if groups
        else [label for _, label in columns],
    )
    lines = frame.to_latex(
        index=False,
        escape=False,
        column_format="l" + "".join("l" if each else "r" for each in words),
        multicolumn_format="c",
    ).splitlines()
    begin = lines.index(r"\midrule") + 1
    # From the last one on, so that the numbers of the lines before it stay.
    for number, row in reversed(list(enumerate(table.rows))):
        if row.strong and number:
            lines.insert(begin + number, r"\midrule")
    if groups:
        lines.insert(begin - 2, _group_rules(groups))
    return "\n".join(lines)


def _group_rules(groups: list[tuple[str, int]]) -> str:
    rules, first = [], 2
    for group, span in groups:
        if group:
            rules.append(rf"\cmidrule(lr){{{first}-{first + span - 1}}}")
        first += span
    return " ".join(rules)


def _row(row: Row, table: Table) -> list[str]:
    label = _bold(escape(row.label), row.strong)
    if label.startswith(("[", "*")):
        # After the end of a row, LaTeX would read these as arguments of `\\`.
        label = f"{{}}{label}"
    return [
        label,
        *(
            _entry(cell, column, strong=row.strong)
            for cell, column in zip(row.cells, table.columns, strict=True)
        ),
    ]


def _entry(cell: Cell, column: Column, *, strong: bool) -> str:
    parts = [_bold(escape(cell_text.measured(cell, column)), strong)]
    if bounds := cell_text.interval(cell, column):
        parts.append(rf"\interval{{{escape(bounds)}}}")
    if paper := cell_text.printed(cell, column):
        parts.append(rf"\printed{{{escape(paper)}}}")
    return " ".join(parts)


def _bold(text: str, strong: bool) -> str:
    return rf"\textbf{{{text}}}" if strong else text


def table_csv(table: Table) -> str:
    """Returns a table as CSV, with one line per row and a header.

    Every column is expanded to up to five: the value in full precision, `… low` and
    `… high` of its interval, `… paper` and `… text`; those that are empty in every row
    are left out.
    """
    import pandas as pd

    columns = []
    for number, column in enumerate(table.columns):
        label = f"{column.group} {column.label}".strip()
        unit = column.unit.removeprefix("+")
        label += f" ({unit})" if unit else ""
        cells = [_parts(row.cells[number]) for row in table.rows]
        for index, part in enumerate(_PARTS):
            entries = [entry[index] for entry in cells]
            if not part or any(entry not in (None, "") for entry in entries):
                columns.append(pd.Series(entries, name=label + part, dtype=object))
    labels = pd.Series(
        [row.label for row in table.rows], name=table.heading, dtype=object
    )
    frame = pd.concat([labels, *columns], axis="columns")
    return frame.to_csv(index=False, lineterminator="\n")


def _parts(cell: Cell) -> tuple[float | str | None, ...]:
    low, high = (None, None) if cell.interval is None else cell.interval
    return cell.value, low, high, cell.paper, cell.text
