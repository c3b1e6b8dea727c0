"""Ctrl-C and the standard streams of a program; imports the standard library only.

An interrupt ends the process at once until its command begins, when nothing has been
written yet: importing the libraries takes seconds and would end in a traceback. In the
command it raises `KeyboardInterrupt`, so that temporary files are removed. Several
libraries (jax, absl and seqio among others) catch every exception in places; therefore
the process is ended a few seconds later, at the latest.
"""

import contextlib
import io
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO, cast

# A command gets this many seconds to clean up after an interrupt.
_GRACE_SECONDS = 3.0

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as shells define it."""

_PACKAGES = ("bpd_jax", "experiments", "benchmarks")

# Standard error, even if libraries redirect file descriptor 2 while they load.
_messages = 2


def is_program() -> bool:
    """Whether this process was started as `bpd` or as `python -m bpd_jax.NAME`.

    Valid only while the package is imported: `sys.argv` changes afterwards.
    """
    if sys.argv[:1] != ["-m"]:
        return bool(sys.argv) and os.path.basename(sys.argv[0]) == "bpd"
    _, _, module = " ".join(sys.orig_argv).partition(" -m ")
    return module.split(" ")[0].partition(".")[0] in _PACKAGES


def begin() -> None:
    """Prepares this process; called once, before anything large is imported."""
    global _messages
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        # Otherwise the next opened file would get the number of the closed stream. What
        # is opened here stays open.
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    _messages = os.dup(2)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> NoReturn:
    """Ends the process immediately."""
    with contextlib.suppress(OSError):
        os.write(_messages, b"interrupted\n")
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the body by `KeyboardInterrupt`, even if a library catches it."""
    before = signal.getsignal(signal.SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or before not in (_leave, signal.default_int_handler):
        yield
        return
    process = os.getpid()
    timer = threading.Timer(_GRACE_SECONDS, _leave)
    timer.daemon = True
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        if os.getpid() == process:  # Not in a child that was forked.
            if interrupted:
                _leave()
            interrupted = True
            timer.start()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if before is not _leave:  # The process continues, as under pytest.
            timer.cancel()
        if interrupted:
            # Also in place of SystemExit, by which absl ends every command.
            raise KeyboardInterrupt


def print_any_text() -> None:
    """Escapes characters that a stream lacks (`\\u00e9`), or that a terminal obeys."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            if stream.isatty():
                setattr(sys, name, cast(TextIO, _Terminal(stream)))


def shown(text: str) -> str:
    r"""Text with its control characters escaped, except tabs and ends of lines.

    Some of them change a terminal: clear it, or write to the clipboard.

    >>> shown("a\tb\x1b]52;\x07\r\n") == "a\tb\\x1b]52;\\x07\r\n"
    True
    """
    obeyed = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)"
    return re.sub(obeyed, lambda found: repr(found[0])[1:-1], text)


class _Terminal:
    """A stream to a terminal, which shows control characters and does not obey them.

    Text may be that of a model, or names in a file from elsewhere. What moves the
    cursor on purpose, as rich does, writes to `rich_proxied_file`.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        return self.rich_proxied_file.write(shown(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def unguarded(stream: TextIO) -> TextIO:
    """The stream itself, for programs that move the cursor of a terminal."""
    return cast(TextIO, getattr(stream, "rich_proxied_file", stream))


def readiness(stream: TextIO) -> int:
    """`select.POLLOUT` if a write would not block, `POLLERR` if the reader is gone."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except (OSError, ValueError):  # Not a file, as a StringIO.
        return select.POLLOUT
    return sum(events for _, events in poll.poll(0))


def discard(stream: TextIO) -> None:
    """Discards all further output of a stream, which would fail when Python exits."""
    # Without a descriptor it is not a file, as a StringIO.
    with open(os.devnull, "w") as nowhere, contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), stream.fileno())
