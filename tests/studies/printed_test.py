"""The paper's numbers: complete, and in keeping with what the text says of them."""

import pytest

from bpd_jax.studies import printed


@pytest.mark.parametrize("name", ["TABLE1", "TABLE3", "TABLE4", "TABLE5", "TABLE8"])
def test_every_task_has_every_column(name):
    table = getattr(printed, name)
    assert tuple(table) == printed.TASKS
    assert len({tuple(cells) for cells in table.values()}) == 1


def test_tables_agree_where_they_repeat_each_other():
    base = printed.column(printed.TABLE4, "bpd")
    assert printed.column(printed.TABLE1, "bpd") == base
    assert printed.column(printed.TABLE10, "9") == base
    for task, cells in printed.TABLE7.items():
        assert cells["ngram_general"] == printed.TABLE4[task]["2g"]
        assert cells["neural_general"] == printed.TABLE4[task]["61M"]
    assert printed.TABLE12[1] == printed.TABLE13[8][16]


def test_lambada_counts_every_position():
    cells = printed.TABLE5["lambada"]
    total = cells["ties"] + cells["wins"] + cells["losses"]
    assert total == pytest.approx((5153 - 100) * 128, abs=50)


def test_means_are_those_of_table_11():
    assert printed.mean(printed.column(printed.TABLE4, "bpd")) == pytest.approx(
        11.52 / 7
    )
