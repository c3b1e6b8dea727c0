"""The table of runs, with numbers counted by hand."""

from bpd_jax.reporting.exhibits import Exhibit
from bpd_jax.reporting.page import run_table

SETTINGS = {"max_new_tokens": 64, "lattice_width": 16, "rounds": 3}


def run(title, counts, **facts):
    examples = {task: {"report": n, "tune": m} for task, (n, m) in counts.items()}
    facts = {"size": "smollm2", "model": "smollm2", "settings": SETTINGS, **facts}
    return Exhibit(title, title, "", "", facts={**facts, "examples": examples})


def rows_of(*exhibits):
    return [
        (row.label, row.cells[0].text, [cell.value for cell in row.cells[4:]])
        for row in run_table(exhibits).rows
    ]


def test_studies_with_equal_settings_share_a_row():
    block = {**SETTINGS, "source": "block"}
    rows = rows_of(
        run("Table 8", {"squad": (24, 12)}),
        run("Table 4", {"squad": (24, 12), "rag": (15, 12)}),
        run("Table E", {"rag": (3, 0)}, settings={"longest_prompt": 32}),
        run("Table 5", {"rag": (9, 12)}),
        run("Table 3", {"rag": (15, 12)}, heads=7, settings=block),
        run("Table 4", {"squad": (2, 0)}, size="tiny", heads=3),
    )
    assert rows == [
        ("smollm2", "2", [None, 39, 24, 2, 64, None, None, 16]),
        ("smollm2", "Table E", [None, 3, 0, 1, None, 32, None, None]),
        ("smollm2", "Table 5", [None, 9, 12, 1, 64, None, None, 16]),
        ("smollm2", "Table 3", [7, 15, 12, 1, 64, None, None, 16]),
        ("tiny", "1", [3, 2, 0, 1, 64, None, None, 16]),
    ]
