"""Keeps a save that fails from printing pages before it is reported in one sentence.

Orbax logs an error with its traceback in every thread that meets it, and then raises
it. Writes that it gives up on are complained of once more when they are collected.
"""

import functools
import logging
import sys


@functools.cache
def quiet_saves() -> None:
    """From now on only exceptions are reported; a second call does nothing."""
    logging.getLogger("absl").addFilter(lambda line: "orbax" not in line.pathname)
    logging.getLogger("asyncio").addFilter(
        lambda line: "exception was never retrieved" not in line.getMessage()
    )
    before = sys.unraisablehook

    def hook(found: "sys.UnraisableHookArgs") -> None:
        if str(found.exc_value) != "Event loop is closed":
            before(found)

    sys.unraisablehook = hook
