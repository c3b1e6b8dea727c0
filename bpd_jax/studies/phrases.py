"""Numbers as they stand in the sentences of findings."""

from bpd_jax.reporting.exhibits import Column
from bpd_jax.reporting.numbers import number


def counted(count: int, noun: str) -> str:
    """Returns a number of things.

    >>> counted(1, "task"), counted(2016, "win")
    ('1 task', '2,016 wins')

    Args:
      count: how many.
      noun: in the singular, whose plural has one more s.
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def decimal(value: float, digits: int = 2, *, sign: bool = False) -> str:
    """Returns a number as tables show it: with a real minus and with thousands.

    >>> decimal(-0.821), decimal(1128.44, 1, sign=True)
    ('−0.82', '+1,128.4')

    Args:
      value: the number.
      digits: decimal places.
      sign: whether a positive value gets one.
    """
    return number(value, Column("", digits=digits), sign=sign)
