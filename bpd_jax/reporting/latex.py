"""An exhibit's tables as LaTeX, for a document that uses booktabs."""

from bpd_jax.reporting import numbers
from bpd_jax.reporting.exhibits import Cell, Column, Row, Table

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
    "−": "$-$",
    "–": "--",
    "—": "---",
    "…": r"\dots{}",
    "’": "'",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "→": r"$\to$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "≈": r"$\approx$",
    "α": r"$\alpha$",
    "λ": r"$\lambda$",
    "Σ": r"$\Sigma$",
    "√": r"$\surd$",
    "²": r"$^2$",
    "\n": " ",
}
_COMMANDS = (
    r"\providecommand{\interval}[1]{{\scriptsize [#1]}}"
    "\n"
    r"\providecommand{\printed}[1]{{\scriptsize\itshape (#1)}}"
)


def escape(text: str) -> str:
    r"""Returns text that LaTeX shows as it is.

    >>> escape("50 % of a_b")
    '50 \\% of a\\_b'
    """
    return "".join(_SPECIAL.get(character, character) for character in text)


def table_latex(table: Table, label: str) -> str:
    r"""Returns a `table` environment.

    Intervals and the paper's numbers are smaller, by the commands `\interval` and
    `\printed`, which a document may define in its own way.

    Args:
      table: to be written.
      label: that the document refers to it by, after `tab:`.
    """
    caption = f"{table.title}. {table.caption}".strip()
    if numbers.has_printed(table):
        caption += " In italics: printed in the paper."
    return "\n".join(
        [
            "% Needs \\usepackage{booktabs}.",
            _COMMANDS,
            r"\begin{table}[t]",
            r"  \centering",
            rf"  \caption{{{escape(caption)}}}",
            rf"  \label{{tab:{label}}}",
            rf"  \begin{{tabular}}{{l{'r' * len(table.columns)}}}",
            r"    \toprule",
            *(f"    {line}" for line in _heading(table)),
            r"    \midrule",
            *(f"    {line}" for row in table.rows for line in _row(row, table)),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _heading(table: Table) -> list[str]:
    labels = [table.heading, *(column.label for column in table.columns)]
    lines = []
    if groups := numbers.groups(table):
        cells, rules, first = [""], [], 2
        for group, span in groups:
            cells.append(rf"\multicolumn{{{span}}}{{c}}{{{escape(group)}}}")
            if group:
                rules.append(rf"\cmidrule(lr){{{first}-{first + span - 1}}}")
            first += span
        lines = [" & ".join(cells) + r" \\", " ".join(rules)]
    return [*lines, " & ".join(map(escape, labels)) + r" \\"]


def _row(row: Row, table: Table) -> list[str]:
    entries = [
        _entry(cell, column, strong=row.strong)
        for cell, column in zip(row.cells, table.columns, strict=True)
    ]
    label = _bold(escape(row.label), row.strong)
    line = " & ".join([label, *entries]) + r" \\"
    return [r"\midrule", line] if row.strong and row is not table.rows[0] else [line]


def _entry(cell: Cell, column: Column, *, strong: bool) -> str:
    parts = [_bold(escape(numbers.measured(cell, column)), strong)]
    if bounds := numbers.interval(cell, column):
        parts.append(rf"\interval{{{escape(bounds)}}}")
    if paper := numbers.printed(cell, column):
        parts.append(rf"\printed{{{escape(paper)}}}")
    return " ".join(parts)


def _bold(text: str, strong: bool) -> str:
    return rf"\textbf{{{text}}}" if strong else text
