"""An exhibit's tables as LaTeX for pdflatex, with all text escaped."""

import re

from bpd_jax.reporting import formatting
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
    "•": r"\textbullet{}",
    "€": r"\texteuro{}",
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
    "≈": r"$\approx$",
    "α": r"$\alpha$",
    "λ": r"$\lambda$",
    "Σ": r"$\Sigma$",
    "√": r"$\surd$",
    "²": r"$^2$",
    "⁸": r"$^8$",
    "\n": " ",
}
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
      table: the table.
      label: label for references, after `tab:`.
    """
    caption = f"{table.title}. {table.caption}".strip()
    if formatting.has_intervals(table):
        caption += f" In brackets: {table.intervals}."
    if formatting.has_printed(table):
        caption += " In italics: values printed in the paper."
    alignment = "".join(
        "l" if words else "r" for words in formatting.columns_of_words(table)
    )
    return "\n".join(
        [
            _PACKAGES,
            _COMMANDS,
            r"\begin{table}[t]",
            r"  \centering",
            rf"  \caption{{{escape(caption)}}}",
            rf"  \label{{tab:{label}}}",
            r"  \resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"  \begin{{tabular}}{{l{alignment}}}",
            r"    \toprule",
            *(f"    {line}" for line in _heading(table)),
            r"    \midrule",
            *(f"    {line}" for row in table.rows for line in _row(row, table)),
            r"    \bottomrule",
            r"  \end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


def _heading(table: Table) -> list[str]:
    labels = [table.heading, *(column.label for column in table.columns)]
    lines = []
    if groups := formatting.groups(table):
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
    if label.startswith(("[", "*")):
        # After the end of a row, LaTeX would read these as arguments of `\\`.
        label = f"{{}}{label}"
    line = " & ".join([label, *entries]) + r" \\"
    return [r"\midrule", line] if row.strong and row is not table.rows[0] else [line]


def _entry(cell: Cell, column: Column, *, strong: bool) -> str:
    parts = [_bold(escape(formatting.measured(cell, column)), strong)]
    if bounds := formatting.interval(cell, column):
        parts.append(rf"\interval{{{escape(bounds)}}}")
    if paper := formatting.printed(cell, column):
        parts.append(rf"\printed{{{escape(paper)}}}")
    return " ".join(parts)


def _bold(text: str, strong: bool) -> str:
    return rf"\textbf{{{text}}}" if strong else text
