"""Signals that end a run after the current step instead of in the middle of it."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Yields a list that receives the number of the first SIGTERM, SIGINT or SIGHUP.

    The second signal has its usual effect. SIGHUP, which is sent when a terminal
    closes, stays ignored if it was ignored before, as under `nohup`.
    """
    received: list[int] = []
    # Only the main thread may set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    # `getsignal` returns None for a handler that was not set from Python and that
    # Python therefore cannot restore.
    previous = {
        kind: signal.getsignal(kind) or signal.SIG_DFL
        for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if kind != signal.SIGHUP or signal.getsignal(kind) != signal.SIG_IGN
    }

    def receive(number: int, _: object) -> None:
        received.append(number)
        restore()

    def restore() -> None:
        for kind, handler in previous.items():
            signal.signal(kind, handler)

    for kind in previous:
        signal.signal(kind, receive)
    try:
        yield received
    finally:
        restore()
