"""The final number of a solution in words, by the rule of GSM8K.

Cobbe et al. 2021: a solution ends with its result after `####`. Models that were not
taught that mark end with it too, more often than not, so elsewhere the last number
counts.
"""

import re
from collections.abc import Sequence
from decimal import Decimal

_MARK = "####"
# A minus sign after a digit is a difference's, not the number's.
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def final_number(text: str) -> Decimal | None:
    """The first number after the last `####`, or else the last number.

    Commas within a number do not count, nor do currency and percent signs around it.

    >>> final_number("He pays $1,200.50 a year, 10% less.")
    Decimal('10')
    >>> final_number("400 + 800 = 1200 #### 1,200")
    Decimal('1200')

    Returns:
      None if there is no number.
    """
    _, mark, result = text.rpartition(_MARK)
    found = _NUMBER.findall(result) if mark else []
    if found:
        return Decimal(found[0].replace(",", ""))
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def scores(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """`final_number`: 1 if the prediction's is that of a right solution, else 0.

    Args:
      prediction: the solution that was written.
      references: right solutions.
    """
    wanted = {final_number(reference) for reference in references} - {None}
    return {"final_number": float(final_number(prediction) in wanted)}
