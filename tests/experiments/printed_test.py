"""The paper's numbers are complete and consistent with its text."""

import pytest

from experiments import printed


@pytest.mark.parametrize("name", ["TABLE1", "TABLE3", "TABLE4", "TABLE5", "TABLE8"])
def test_every_task_has_every_column(name):
    table = getattr(printed, name)
    assert tuple(table) == printed.TASKS
    assert len({tuple(cells) for cells in table.values()}) == 1


def test_repeated_numbers_of_tables_agree():
    base = printed.column(printed.TABLE4, "bpd")
    assert printed.column(printed.TABLE1, "bpd") == base
    assert printed.column(printed.TABLE10, "9") == base
    for task, cells in printed.TABLE7.items():
        assert cells["ngram_general"] == printed.TABLE4[task]["2g"]
        assert cells["neural_general"] == printed.TABLE4[task]["61M"]
    assert printed.TABLE12[1] == printed.TABLE13[8][16]


def test_table_e_contradicts_the_gains_stated_in_the_text():
    gains = [
        100 * (table[f"{base}_rescored"][task] / table[base][task] - 1)
        for table in printed.TABLE_E.values()
        for base in ("bpd", "medusa")
        for task in printed.TABLE_E_TASKS
    ]
    assert min(gains) == pytest.approx(-0.5, abs=0.05)
    assert max(gains) == pytest.approx(10.5, abs=0.05)
    rescored = [table["medusa_rescored"] for table in printed.TABLE_E.values()]
    assert max(max(row.values()) for row in rescored) == 2.519
