"""Ends all processes of a run with a one-line error when one of them has failed.

If a process is killed or its host is lost, the others wait for it in the middle of a
step until jax's heartbeats time out, and then end with a C++ stack trace. Therefore
process 0 keeps a TCP connection to every other process, from before jax initializes its
devices until training ends. The others learn its port from jax's coordinator. A
connection that closes without a goodbye message means that its process has died;
process 0 then notifies the others. A process that ends with an error says so: the
others, which may be about to end with the same error, end after a few seconds.
Process 0, which hosts jax's coordinator, ends last, because the others would crash
without it. Nothing is saved: the next start resumes from the last checkpoint.
"""

import atexit
import contextlib
import itertools
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator

from bpd_jax.base import progress, startup
from bpd_jax.base.errors import UserError
from bpd_jax.training import distributed

# Kinds of messages, each followed by the number of the process that it concerns: the
# process exits normally, exits with an error, or has died.
_GOODBYE, _ERROR, _DEATH = b".", b"?", b"!"
# The answer of process 0 to a greeting; from then on the end of a connection counts.
_WELCOME = b"+"
# In the coordinator's key-value store, with a number for each `watched` of the process.
_KEY = "bpd_jax/peers"
_entries = itertools.count()

# Seconds in which a process may end with the same error as another one.
_SAME_ERROR = 10
# Seconds after which this process knows why a collective operation failed, and in which
# others end after a message.
_NOTICE = 5
# Seconds in which all processes connect, and in which one of them identifies itself.
_CONNECT_TIMEOUT, _GREETING_TIMEOUT = 30, 2
# Seconds in which a process that has failed ends, and in which the last process
# reaches the end of training after the first.
_END, _LAST = 30, 3600
# Seconds without traffic before TCP probes whether the other host is still there.
_KEEPALIVE = 20

_is_watching = False


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Watches the other processes of the run; does nothing in a run of one process.

    All processes must enter it, and all must leave it if one leaves it regularly or by
    a SystemExit of a signal. Within another `watched` it does nothing. A process that
    cannot connect is not watched, and process 0 prints a warning. After any other
    exception this process does not take part in jax's shutdown, which would wait for
    the others and then crash: at its end it exits with status 1, or 130 if it was
    interrupted.

    Raises:
      UserError: an operation failed because another process has failed.
    """
    global _is_watching
    run = distributed.membership()
    if run.count == 1 or _is_watching:
        yield
        return
    key = f"{_KEY}/{next(_entries)}"
    peers = _Peers(run.index)
    _is_watching = True
    try:
        peers.connect(run, key)
        yield
        # All are still watched until the last one is here.
        run.client.wait_at_barrier(f"{key}/end", 1000 * _LAST)
    except SystemExit as end:
        # All processes stop at the same step after a signal.
        stopped = not end.code or (isinstance(end.code, int) and end.code > 128)
        peers.leave(_GOODBYE if stopped else _ERROR)
        raise
    except KeyboardInterrupt:
        peers.leave(_DEATH, startup.INTERRUPTED)
        raise
    except Exception as error:
        # The end of another process makes collective operations of this one fail, some
        # of them within a save, whose error is a UserError with a cause.
        is_ours = isinstance(error, UserError)
        may_follow = not is_ours or error.__cause__ is not None
        known = may_follow and peers.noticed.wait(_NOTICE)
        peers.leave(_ERROR)
        if known and (peers.died or not is_ours):
            raise UserError(peers.message) from error
        raise
    finally:
        _is_watching = False
    peers.leave(_GOODBYE)


class _Peers:
    """Connections to the other processes, each with a thread that reads from it.

    Attributes:
      noticed: set when another process has failed; `message` names it, and `died` is
        whether it did not report an error.
    """

    def __init__(self, index: int) -> None:
        """Initializes without connections; `index` is the number of this process."""
        self.noticed = threading.Event()
        self.message, self.died = "", False
        self._index = index
        self._links: dict[int, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()  # Training has ended in this process.
        self._failure = threading.Lock()  # Taken by the thread that reports a failure.
        self._end = threading.Lock()  # Taken by the thread that ends the process.

    def connect(self, run: distributed.Membership, key: str) -> None:
        """Connects the processes, which agree on `key`, and begins to watch."""
        connect = _connect_to_first if run.index else _connect_all
        self._links = connect(run, key)
        self._threads = [
            threading.Thread(target=self._watch, args=(number,), daemon=True)
            for number in self._links
        ]
        for thread in self._threads:
            thread.start()

    def leave(self, kind: bytes, status: int = 1) -> None:
        """Notifies the others how this process ends.

        Args:
          kind: kind of message.
          status: exit status of this process unless it ends regularly.
        """
        self._ended.set()
        self._end.acquire()  # Waits forever if another thread is ending the process.
        self._send(kind, self._index)
        if kind == _GOODBYE:
            return
        # Runs before what jax has registered.
        atexit.register(_exit, status)
        if not self._index:
            self._wait(_SAME_ERROR + _NOTICE if kind == _ERROR else _NOTICE / 2)
        threading.Thread(target=_exit_at_last, args=(status,), daemon=True).start()

    def _watch(self, number: int) -> None:
        """Reads from process `number`; ends this process if another one has failed."""
        link = self._links[number]
        kind, failed = _DEATH, number
        with contextlib.suppress(OSError):
            message = _receive(link, 5)
            if len(message) == 5:
                kind, failed = message[:1], int.from_bytes(message[1:])
        if kind == _GOODBYE:
            return
        if not self._ended.is_set() and self._failure.acquire(blocking=False):
            self._report(kind, failed)
        # The connection closes when the other process has ended; see `_wait`.
        with contextlib.suppress(OSError):
            while link.recv(64):
                pass

    def _report(self, kind: bytes, failed: int) -> None:
        """Ends this process because process `failed` has, unless it ends by itself."""
        if not self._index:
            self._send(kind, failed)
        self.died = kind == _DEATH
        end = "has died" if self.died else "has ended with an error"
        self.message = (
            f"process {failed} of this run {end}: see its own output; start the run "
            "again to resume from the last checkpoint."
        )
        self.noticed.set()
        if kind == _ERROR and self._ended.wait(_SAME_ERROR):
            return
        if not self._index:
            self._wait(_NOTICE)
        if not self._end.acquire(blocking=False):
            return  # The thread that trains reports it.
        # It ends even if its output is not read, or the disk of its log is full.
        with contextlib.suppress(OSError, ValueError):
            if progress.is_writable(sys.stderr):
                os.write(2, f"\nerror: {self.message}\n".encode())
        os._exit(1)

    def _wait(self, seconds: float) -> None:
        """Waits until the others have ended, which need this process's coordinator."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _send(self, kind: bytes, number: int) -> None:
        """Sends a message of a kind about process `number` to all others."""
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.sendall(kind + number.to_bytes(4))


def _exit(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if progress.is_writable(stream):
                stream.flush()
    os._exit(status)


def _exit_at_last(status: int) -> None:
    """Ends the process when its main thread has, or after half a minute.

    Threads of Orbax may wait for a save that failed, and the main thread for a reader
    of its output.
    """
    threading.main_thread().join(_END)
    if threading.main_thread().is_alive():
        os._exit(status)  # It may hold the locks of the streams.
    _exit(status)


def _connect_all(run: distributed.Membership, key: str) -> dict[int, socket.socket]:
    """Process 0: accepts a connection from every other process, by process number."""
    token = secrets.token_bytes(16)
    links: dict[int, socket.socket] = {}
    lock, closed = threading.Lock(), False

    def greet(link: socket.socket) -> None:
        """Accepts a connection that presents the token, and closes others."""
        with contextlib.suppress(OSError):
            link.settimeout(_GREETING_TIMEOUT)
            greeting = _receive(link, len(token) + 4)
            number = int.from_bytes(greeting[len(token) :])
            with lock:
                if greeting[: len(token)] == token and not closed:
                    link.sendall(_WELCOME)
                    links[number] = _keep_alive(link)
                    return
        link.close()

    with _listen() as server:
        server.settimeout(0.2)
        run.client.key_value_set(
            key, json.dumps([server.getsockname()[1], token.hex()])
        )
        deadline = time.monotonic() + _CONNECT_TIMEOUT
        while len(links) < run.count - 1 and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                link, _ = server.accept()
                threading.Thread(target=greet, args=(link,), daemon=True).start()
        with lock:
            closed = True
    missing = [str(number) for number in range(1, run.count) if number not in links]
    if missing:
        progress.say(
            f"warning: process {', '.join(missing)} could not connect to process 0 of "
            "this run: if one of them fails, the others notice it only after minutes.",
            sys.stderr,
        )
    return links


def _listen() -> socket.socket:
    """A server of IPv4 and, where the host has it, of IPv6."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=1024)


def _connect_to_first(
    run: distributed.Membership, key: str
) -> dict[int, socket.socket]:
    """Other processes: connects to process 0; empty if that fails."""
    try:
        text = run.client.blocking_key_value_get(key, 1000 * _CONNECT_TIMEOUT)
        port, token = json.loads(text)
        address = (run.coordinator, port)
        link = socket.create_connection(address, timeout=_CONNECT_TIMEOUT)
        link.sendall(bytes.fromhex(token) + run.index.to_bytes(4))
        if _receive(link, 1) == _WELCOME:
            return {0: _keep_alive(link)}
        link.close()
    # jax raises a RuntimeError if there is no answer in time.
    except (OSError, RuntimeError):
        pass
    return {}


def _keep_alive(link: socket.socket) -> socket.socket:
    """Removes the timeout and enables TCP keepalive, which detects a lost host."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (
        ("TCP_KEEPIDLE", _KEEPALIVE),
        ("TCP_KEEPINTVL", _KEEPALIVE // 4),
        ("TCP_KEEPCNT", 4),
    ):
        # Not all operating systems have these options.
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return link


def _receive(link: socket.socket, count: int) -> bytes:
    """Receives `count` bytes, or fewer if the connection closes."""
    received = b""
    while len(received) < count and (part := link.recv(count - len(received))):
        received += part
    return received
