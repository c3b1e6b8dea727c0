"""Progress bars: live in a terminal, occasional lines in a log file.

Output never raises and never blocks: if the terminal was closed or a pipe is full, it
is dropped.
"""

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from bpd_jax.base.startup import discard, readiness, unguarded

_T = TypeVar("_T")

# A log file gets one line per this many seconds instead of a redrawn bar.
_LOG_SECONDS = 15.0

_hidden = False


def bar(
    iterable: Iterable[_T] | None = None,
    *,
    label: str,
    total: int | None = None,
    unit: str = "it",
    initial: int = 0,
    **kwargs: Any,
) -> "tqdm[_T]":
    """Returns a `tqdm` bar with the project's settings; use it like `tqdm`.

    The label has one or two words. `initial` is the number of units already done, for
    a resumed run. Further arguments are those of `tqdm`.
    """
    live = sys.stderr.isatty()
    kwargs.setdefault("disable", _hidden)
    # Rates are averages from the beginning: the first unit often includes compilation,
    # and several units may end together.
    return tqdm(
        iterable,
        desc=f"{label:<14}",
        total=total,
        unit=unit,
        initial=initial,
        mininterval=0.2 if live else _LOG_SECONDS,
        maxinterval=_LOG_SECONDS,
        miniters=1,
        smoothing=0,
        dynamic_ncols=live,
        ncols=None if live else 88,
        ascii=None if live else " -",
        file=_NonBlocking(unguarded(sys.stderr)),
        **kwargs,
    )


def hide() -> None:
    """Hides all later bars: another process of the run shows them."""
    global _hidden
    _hidden = True


def advance(bar: "tqdm[Any]", label: str, count: int = 1) -> None:
    """Advances a bar by `count` units of what `label` names."""
    bar.set_postfix_str(label, refresh=False)
    bar.update(count)


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints a line, by default to standard output, or drops it if that fails."""
    _NonBlocking(sys.stdout if stream is None else stream).write(f"{text}\n")


@contextlib.contextmanager
def waiting(text: str, seconds: float = 2.0) -> Iterator[None]:
    """Says on standard error what is going on if the body takes longer."""
    timer = threading.Timer(seconds, say, (text, sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _NonBlocking:
    """A text stream that drops writes that would fail or block."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Writes and flushes, or drops the text."""
        try:
            if not self._stream.closed and readiness(self._stream):
                self._stream.write(text)
                self._stream.flush()
        except OSError:
            discard(self._stream)

    def flush(self) -> None:
        """Does nothing: `write` flushes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
