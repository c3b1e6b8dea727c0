"""An exhibit in a terminal of a hundred columns, without colour."""

import io

from rich.console import Console

from bpd_jax.reporting.exhibit_terminal import print_exhibit
from bpd_jax.reporting.exhibits import Cell, Column, Exhibit, Finding, Row, Table


def test_numbers_findings_and_notes_are_printed():
    columns = [Column("BPD"), Column("gain", digits=1, unit="+%")]
    rows = [
        Row("SQuAD", [Cell(1.236, 2.08), Cell(18.44, text="*")]),
        Row("QA", [Cell(text="not measured"), Cell(-0.5)], strong=True),
    ]
    exhibit = Exhibit(
        "table4",
        "Block efficiency",
        "Table 4",
        "How much?",
        tables=[Table("table4", "Tokens per call", "task", columns, rows, "Ours.")],
        findings=[
            Finding("It grows.", True, "On 2 of 2."),
            Finding("It falls.", False, "On none."),
            Finding("It stays.", None, "Too few."),
        ],
        notes=["Not the paper's model."],
        facts={"left_out": {"neural:1": "there is no such model."}},
    )
    out = io.StringIO()
    print_exhibit(exhibit, Console(file=out, width=100, color_system=None))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    (squad,) = [line for line in lines if line.startswith(" SQuAD")]
    assert squad.split() == ["SQuAD", "1.24", "(2.08)", "+18.4", "%", "*"]
    (qa,) = [line for line in lines if line.startswith(" QA")]
    assert qa.split() == ["QA", "not", "measured", "−0.5", "%"]
    assert "✓ It grows. On 2 of 2." in lines
    assert "✗ It falls. On none." in lines
    assert "? It stays. Too few." in lines
    assert "Note: Not the paper's model." in lines
    assert "Note: Left out: neural:1: there is no such model." in lines
