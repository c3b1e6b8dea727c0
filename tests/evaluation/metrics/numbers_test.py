"""Final numbers of solutions."""

from decimal import Decimal

import pytest

from bpd_jax.evaluation.metrics import numbers


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("He pays 400*.5=$<<400*.5=200>>200 more.\n#### 1000", "1000"),
        ("#### 1,200\nSo 5 are left.", "1200"),
        ("#### \nThe answer is 7.", "7"),
        ("It costs $1,234,567.50.", "1234567.50"),
        ("10-4=6", "6"),
        ("That is 10-4", "4"),
        ("It is -4.", "-4"),
        ("one of 1,2,3", "3"),
        ("half: 0.5, or 50%", "50"),
        ("x = 12", "12"),
        ("the answer is 5.00", "5"),
        ("in 12345,678", "678"),
    ],
)
def test_final_numbers(text, wanted):
    assert numbers.final_number(text) == Decimal(wanted)


def test_no_number():
    assert numbers.final_number("none of them") is None
    assert numbers.scores("none", ["I do not know."]) == {"final_number": 0.0}
    assert numbers.scores("none", ["#### 3"]) == {"final_number": 0.0}


def test_numbers_are_compared_and_not_their_spelling():
    references = ["2 + 3 = 5\n#### 5"]
    assert numbers.scores("So it is $5.00.", references) == {"final_number": 1.0}
    assert numbers.scores("5 minus 1 is 4", references) == {"final_number": 0.0}


@pytest.mark.parametrize("name", ["gsm8k/test"])
def test_reference_solutions_are_correct(records, name):
    for record in records(name, 2000):
        result = record["answer"].split("####")[1].strip().replace(",", "")
        assert numbers.final_number(record["answer"]) == Decimal(result)
        assert numbers.scores(f"It is {result}.", [record["answer"]]) == {
            "final_number": 1.0
        }
