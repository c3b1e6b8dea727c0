"""Suppresses Orbax's log of failed saves, which are reported in one sentence.

Orbax logs an error with its traceback in every thread in which it occurs before it
raises it. Abandoned writes are logged again when they are garbage-collected.
"""

import functools
import logging
import sys


@functools.cache
def quiet_saves() -> None:
    """Suppresses Orbax's log of errors; a second call does nothing."""
    logging.getLogger("absl").addFilter(lambda line: "orbax" not in line.pathname)
    logging.getLogger("asyncio").addFilter(
        lambda line: "exception was never retrieved" not in line.getMessage()
    )
    previous = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous(unraisable)

    sys.unraisablehook = hook
