"""The final number of a worked solution, by the rule of GSM8K.

In GSM8K (Cobbe et al. 2021) a solution ends with its result after `####`. Models that
were not trained on this format usually end with the result as well, so without a `####`
the last number counts.
"""

import re
from collections.abc import Sequence
from decimal import Decimal

_MARK = "####"
# A minus sign after a digit denotes a difference, not a negative number.
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def final_number(text: str) -> Decimal | None:
    """The first number after the last `####`, or else the last number.

    Commas within a number, and currency and percent signs, are ignored.

    >>> final_number("He pays $1,200.50 a year, 10% less.")
    Decimal('10')
    >>> final_number("400 + 800 = 1200 #### 1,200")
    Decimal('1200')

    Returns:
      None if there is no number.
    """
    _, mark, result = text.rpartition(_MARK)
    numbers = _NUMBER.findall(result)[:1] if mark else []
    numbers = numbers or _NUMBER.findall(text)[-1:]
    return Decimal(numbers[0].replace(",", "")) if numbers else None


def scores(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """`final_number`: 1 if the final number is that of a reference, else 0.

    Args:
      prediction: a generated solution.
      references: correct solutions.
    """
    correct = {final_number(reference) for reference in references} - {None}
    return {"final_number": float(final_number(prediction) in correct)}
