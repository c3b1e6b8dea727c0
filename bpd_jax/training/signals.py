"""Ending a run between two steps, not in the middle of one."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Yields a list that receives the first SIGTERM, SIGINT or SIGHUP.

    A second one acts. SIGHUP, which a closed terminal sends, stays ignored where it is,
    as under `nohup`.
    """
    received: list[int] = []
    # Only the main thread may set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    # None: a handler that a library set, which Python cannot set again.
    before = {
        kind: signal.getsignal(kind) or signal.SIG_DFL
        for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if kind != signal.SIGHUP or signal.getsignal(kind) != signal.SIG_IGN
    }

    def receive(number: int, _: object) -> None:
        received.append(number)
        restore()

    def restore() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    for kind in before:
        signal.signal(kind, receive)
    try:
        yield received
    finally:
        restore()
