"""Final numbers of solutions."""

from decimal import Decimal

import pytest

from bpd_jax.evaluation.metrics import final_number


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
def test_final_number_of_texts(text, wanted):
    assert final_number.final_number(text) == Decimal(wanted)


def test_texts_without_a_number():
    assert final_number.final_number("none of them") is None
    assert final_number.scores("none", ["I do not know."]) == {"final_number": 0.0}
    assert final_number.scores("none", ["#### 3"]) == {"final_number": 0.0}


def test_numbers_are_compared_by_value():
    references = ["2 + 3 = 5\n#### 5"]
    assert final_number.scores("So it is $5.00.", references) == {"final_number": 1.0}
    assert final_number.scores("5 minus 1 is 4", references) == {"final_number": 0.0}


@pytest.mark.parametrize("name", ["gsm8k/test"])
def test_every_real_solution_scores_1_against_itself(records, name):
    for record in records(name, 2000):
        result = record["answer"].split("####")[1].strip().replace(",", "")
        assert final_number.final_number(record["answer"]) == Decimal(result)
        assert final_number.scores(f"It is {result}.", [record["answer"]]) == {
            "final_number": 1.0
        }
