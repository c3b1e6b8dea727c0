"""Start-up of a program: handling of Ctrl-C and of closed standard streams.

Python raises `KeyboardInterrupt` for Ctrl-C. That is not enough here: importing the
libraries takes seconds and would end in a traceback, and several of them (jax, absl and
seqio among others) catch every exception in places, so that an interrupt disappears.
A program therefore passes through two phases:

- until its command begins, an interrupt ends the process at once: nothing has been
  written yet;
- in the command, an interrupt raises `KeyboardInterrupt`, so that temporary files are
  removed; if the process has not ended a few seconds later, it is ended then.

This module imports nothing outside the standard library, because it runs first.
"""

import contextlib
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

# A command gets this many seconds to clean up after an interrupt.
_GRACE_SECONDS = 3.0

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as shells define it."""

UNREAD = 128 + signal.SIGPIPE
"""Exit status of a program whose output is no longer read, as shells define it."""

# Standard error, even if libraries redirect file descriptor 2 while they load.
_messages = 2


def is_program() -> bool:
    """Whether this process was started as `bpd` or as `python -m bpd_jax.NAME`.

    Valid only while the package is imported: `sys.argv` changes afterwards.
    """
    if sys.argv[:1] != ["-m"]:
        return bool(sys.argv) and os.path.basename(sys.argv[0]) == "bpd"
    words = sys.orig_argv
    return "-m" in words[:-1] and (
        words[words.index("-m") + 1].partition(".")[0] == "bpd_jax"
    )


def begin() -> None:
    """Prepares this process; called once, before anything large is imported."""
    global _messages
    _open_streams()
    _messages = os.dup(2)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    """Ends the process immediately."""
    with contextlib.suppress(OSError):
        os.write(_messages, b"interrupted\n")
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the body by `KeyboardInterrupt`, even if a library catches it.

    Raises:
      KeyboardInterrupt: there was an interrupt, now or earlier in the body.
    """
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
        if os.getpid() == process:
            if interrupted:
                _leave()
            interrupted = True
            timer.start()
        raise KeyboardInterrupt

    show = sys.unraisablehook

    # In a destructor or in a callback of the garbage collector, Python itself catches
    # the exception and prints a traceback.
    def show_others(ignored: "sys.UnraisableHookArgs") -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            show(ignored)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = show_others
    try:
        yield
        if interrupted:
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = show
        if before is not _leave:  # The process continues, as under pytest.
            timer.cancel()


def _open_streams() -> None:
    """Opens /dev/null in place of standard streams that are closed.

    Otherwise the next opened file would get the number of the stream, and output of
    libraries would be written into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if descriptor else "r"
            stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def print_any_text() -> None:
    """Escapes characters that the encoding of a stream lacks (`\\u00e9`)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def descriptor_of(stream: TextIO) -> int | None:
    """The file descriptor of a stream; None if it is not a file, as a StringIO."""
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def is_unread(stream: TextIO) -> bool:
    """Whether a stream is a pipe whose reader is gone."""
    descriptor = descriptor_of(stream)
    if descriptor is None:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def discard(stream: TextIO) -> None:
    """Discards all further output of a stream.

    Otherwise flushing its buffer would fail when the process exits, and change its exit
    status.
    """
    descriptor = descriptor_of(stream)
    if descriptor is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
