"""Progress bars: live in a terminal, a line now and then in a log file."""

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

_T = TypeVar("_T")

# A log file gets one line per this many seconds instead of a redrawn bar.
_LOG_SECONDS = 15.0


def bar(
    iterable: Iterable[_T] | None = None,
    *,
    label: str,
    total: int | None = None,
    unit: str = "it",
    initial: int = 0,
    **kwargs: Any,
) -> "tqdm[_T]":
    """Returns a `tqdm` bar with the project's look; use it like `tqdm`.

    Args:
      iterable: what to walk, or None to call `update` by hand.
      label: what the work is, in one or two words.
      total: number of units; taken from `iterable` if it has a length.
      unit: name of one unit; with `unit_scale=True` it is counted in k and M.
      initial: units already done, for work that resumes.
      **kwargs: passed on to `tqdm`.
    """
    live = sys.stderr.isatty()
    return tqdm(
        iterable,
        desc=f"{label:<14}",
        total=total,
        unit=unit,
        initial=initial,
        mininterval=0.2 if live else _LOG_SECONDS,
        maxinterval=_LOG_SECONDS,
        dynamic_ncols=live,
        ncols=None if live else 88,
        ascii=None if live else " -",
        file=sys.stderr,
        **kwargs,
    )
