"""Tables as LaTeX and CSV."""

import csv
import io
import re

from bpd_jax.reporting.exhibits import Cell, Column, Row, Table
from bpd_jax.reporting.table_files import escape, table_csv, table_latex

TABLE = Table(
    "table4",
    "Block efficiency",
    "Task",
    [
        Column("BPD"),
        Column("2-gram", "1-best"),
        Column("4-gram, α", "1-best"),
        Column("gain", digits=1, unit="+%"),
    ],
    [
        Row(
            "SQuAD, \"v1\" & 50 % of a_b",
            [
                Cell(1.5678, 2.08, (1.49, 1.66)),
                Cell(1.6, 2.09),
                Cell(paper=2.07, text="not measured"),
                Cell(-2.25, interval=(-4.0, 1.0)),
            ],
        ),
        Row("Mean", [Cell(2.0), Cell(), Cell(3.0), Cell(12.0)], strong=True),
    ],
    "95 % bootstrap intervals.",
)  # fmt: skip


def test_csv_has_separate_columns_for_values_bounds_and_printed_values():
    rows = list(csv.DictReader(io.StringIO(table_csv(TABLE))))
    assert rows[0] == {
        "Task": 'SQuAD, "v1" & 50 % of a_b',
        "BPD": "1.5678",
        "BPD low": "1.49",
        "BPD high": "1.66",
        "BPD paper": "2.08",
        "1-best 2-gram": "1.6",
        "1-best 2-gram paper": "2.09",
        "1-best 4-gram, α": "",
        "1-best 4-gram, α paper": "2.07",
        "1-best 4-gram, α text": "not measured",
        "gain (%)": "-2.25",
        "gain (%) low": "-4.0",
        "gain (%) high": "1.0",
    }
    assert float(rows[1]["1-best 4-gram, α"]) == 3.0
    assert rows[1]["1-best 2-gram"] == rows[1]["BPD low"] == ""


def cells_of(text):
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    lines = [line.strip() for line in body.splitlines() if line.strip().endswith(r"\\")]
    return [re.split(r"(?<!\\) & ", line.removesuffix(r" \\")) for line in lines]


def test_latex_has_every_number_in_its_cell():
    text = table_latex(TABLE, "table4_smollm2")
    squad, mean = cells_of(text)
    assert squad == [
        r"SQuAD, \textquotedbl{}v1\textquotedbl{} \& 50 \% of a\_b",
        r"1.57 \interval{1.49--1.66} \printed{2.08}",
        r"1.60 \printed{2.09}",
        r"not measured \printed{2.07}",
        r"$-$2.2 \% \interval{$-$4.0 \dots{} +1.0}",
    ]
    assert mean == [
        r"\textbf{Mean}",
        r"\textbf{2.00}",
        r"\textbf{---}",
        r"\textbf{3.00}",
        r"\textbf{+12.0 \%}",
    ]
    assert r"\label{tab:table4_smollm2}" in text
    environments = re.findall(r"\\(?:begin|end)\{(\w+)\}", text)
    assert environments == ["table", "tabular", "tabular", "table"]
    for command in ("interval", "printed", "codepoint"):
        assert text.index(rf"\providecommand{{\{command}}}") < text.index(r"\begin")
    without_escapes = re.sub(r"\\[{}]", "", text)
    assert without_escapes.count("{") == without_escapes.count("}")
    # Groups span their columns.
    assert r"\begin{tabular}{lrrrr}" in text
    assert r"\multicolumn{2}{c}{} & \multicolumn{2}{c}{1-best} & " in text
    assert re.findall(r"\\cmidrule\S+", text) == [r"\cmidrule(lr){3-4}"]
    assert r"4-gram, $\alpha$" in text


def test_latex_of_model_output_is_latin_1():
    """Unescaped characters are those of the font encodings T1 and TS1."""
    output = "⟦a⏎⇥b·∅⟧ “ça” 日 😀 ł\u202e\x1b\tπ"
    columns, rows = [Column(output, output)], [Row(output, [Cell(text=output)])]
    table = Table("table2", output, output, columns, rows, output)
    text = table_latex(table, "table2")
    assert all((c.isprintable() and ord(c) < 256) or c in "\n\t" for c in text)
    assert escape(output) == (
        r"$[\![$a$\hookleftarrow$$\mapsto$b$\cdot$$\emptyset$$]\!]$ ``ça'' "
        r"\codepoint{65E5} \codepoint{1F600} \codepoint{0142}"
        r"\textbackslash{}u202e\textbackslash{}x1b"
        "\t" + r"\codepoint{03C0}"
    )


def test_labels_are_not_arguments_of_the_previous_row():
    rows = [Row(label, [Cell(1.0)]) for label in ("BPD", "[INST]", "*")]
    text = table_latex(Table("t", "T", "task", [Column("BE")], rows), "t")
    assert [row[0] for row in cells_of(text)] == ["BPD", "{}[INST]", "{}*"]


def test_special_characters_are_escaped():
    assert escape("--flag a-b") == "-{}-flag a-b"
    assert escape(r"\x{y}~^") == (
        r"\textbackslash{}x\{y\}\textasciitilde{}\textasciicircum{}"
    )
    assert (
        escape("a−b ≥ 2 × <k>") == r"a$-$b $\ge$ 2 $\times$ \textless{}k\textgreater{}"
    )
