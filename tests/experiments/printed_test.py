"""The paper's numbers are complete and consistent with its text."""

from experiments import printed


def test_repeated_numbers_of_tables_agree():
    base = printed.column(printed.TABLE4, "bpd")
    assert printed.column(printed.TABLE1, "bpd") == base
    assert printed.column(printed.TABLE10, "9") == base
    for task, cells in printed.TABLE7.items():
        assert cells["ngram_general"] == printed.TABLE4[task]["2g"]
        assert cells["neural_general"] == printed.TABLE4[task]["61M"]
    assert printed.TABLE12[1] == printed.TABLE13[8][16]
