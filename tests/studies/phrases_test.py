from bpd_jax.studies.tables import counted, decimal


def test_counts_use_singular_and_plural():
    texts = [counted(number, "task") for number in (0, 1, 2, 2016)]
    assert texts == ["0 tasks", "1 task", "2 tasks", "2,016 tasks"]


def test_decimals_have_a_real_minus_and_thousands():
    assert decimal(-0.821) == "−0.82"
    assert decimal(1128.44, 1, sign=True) == "+1,128.4"
    assert decimal(0.001, sign=True) == "0.00"
