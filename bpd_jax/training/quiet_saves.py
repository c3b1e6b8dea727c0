"""Suppresses the log of failed saves, which are reported in one sentence.

Orbax logs an error with its traceback in every thread that it occurs in, and then
raises it. Abandoned writes are logged once more when they are garbage-collected.
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
    before = sys.unraisablehook

    def hook(found: "sys.UnraisableHookArgs") -> None:
        if str(found.exc_value) != "Event loop is closed":
            before(found)

    sys.unraisablehook = hook
