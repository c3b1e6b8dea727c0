"""Ends all processes of a run with a one-line error when one of them has died.

If a process is killed or its host is lost, the others wait for it in the middle of a
step until jax's heartbeats time out, and then end with a C++ stack trace. Therefore
process 0 keeps a TCP connection to every other process during training. A connection
that closes without a goodbye message means that its process has died; process 0 then
notifies the others. A process that ends with an error says so: the others, which may be
about to end with the same error, end after a few seconds. Nothing is saved: the next
start resumes from the last checkpoint.
"""

import contextlib
import dataclasses
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import jax

from bpd_jax.errors import UserError
from bpd_jax.training import distributed

# Kinds of messages, each followed by the number of the process that they are about: it
# ends regularly, ends with an error, or has died.
_GOODBYE, _ERROR, _DEATH = b".", b"?", b"!"

# Seconds in which a process may end with the same error as another one.
_SAME_ERROR = 10
# Seconds after which this process has learnt why a collective operation failed.
_NOTICE = 5

_CONNECT_TIMEOUT = 30  # seconds
# Seconds without traffic before TCP probes whether the other host is still there.
_KEEPALIVE = 20


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Watches the other processes of the run; does nothing in a run of one process.

    All processes must enter it. A process that cannot connect is not watched.
    """
    if jax.process_count() == 1:
        yield
        return
    links = _connect_all() if distributed.is_first() else _connect_to_first()
    state = _State(links)
    threads = [
        threading.Thread(target=_watch, args=(number, state), daemon=True)
        for number in links
    ]
    for thread in threads:
        thread.start()
    kind = _ERROR
    try:
        yield
        kind = _GOODBYE
    except SystemExit:  # All processes stop at the same step.
        kind = _GOODBYE
        raise
    except UserError:
        raise
    except Exception as error:
        # The end of another process makes collective operations of this one fail.
        if state.noticed.wait(_NOTICE):
            raise UserError(state.message) from error
        raise
    finally:
        state.ended.set()
        _send(links, kind, jax.process_index())
        if kind == _ERROR and distributed.is_first():
            # This process hosts jax's coordinator, without which the others crash.
            deadline = time.monotonic() + _SAME_ERROR + _NOTICE
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))


@dataclasses.dataclass
class _State:
    """What the watching threads and the training thread know of each other.

    Attributes:
      links: connections by the number of the process at the other end.
      ended: set when training has ended in this process.
      noticed: set when another process has ended with an error; `message` names it.
    """

    links: dict[int, socket.socket]
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    noticed: threading.Event = dataclasses.field(default_factory=threading.Event)
    message: str = ""


def _connect_all() -> dict[int, socket.socket]:
    """Process 0: accepts a connection from every other process, by process number."""
    token = secrets.token_bytes(16)
    count = jax.process_count()
    links: dict[int, socket.socket] = {}
    with socket.create_server(("", 0), backlog=count) as server:
        server.settimeout(_CONNECT_TIMEOUT)
        port = server.getsockname()[1]
        distributed.agree((distributed.own_host(), port, token.hex()))
        with contextlib.suppress(OSError):
            while len(links) < count - 1:
                link, _ = server.accept()
                link.settimeout(_CONNECT_TIMEOUT)
                greeting = _receive(link, len(token) + 4)
                if greeting[: len(token)] != token:
                    link.close()
                    continue
                links[int.from_bytes(greeting[len(token) :])] = _keep_alive(link)
    return links


def _connect_to_first() -> dict[int, socket.socket]:
    """Other processes: connects to process 0; empty if that fails."""
    host, port, token = distributed.agree(("", 0, ""))
    try:
        link = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT)
        link.sendall(bytes.fromhex(token) + jax.process_index().to_bytes(4))
    except OSError:
        return {}
    return {0: _keep_alive(link)}


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


def _watch(number: int, state: _State) -> None:
    """Waits for a message of process `number`; ends this process if one has failed."""
    kind, failed = _DEATH, number
    with contextlib.suppress(OSError):
        message = _receive(state.links[number], 5)
        if len(message) == 5:
            kind, failed = message[:1], int.from_bytes(message[1:])
    if kind == _GOODBYE or (kind == _DEATH and state.ended.is_set()):
        return
    if distributed.is_first():
        _send(state.links, kind, failed)
    end = "has died" if kind == _DEATH else "has ended with an error"
    state.message = (
        f"process {failed} of this run {end}: see its own output; start the run again "
        "to resume from the last checkpoint."
    )
    if kind == _ERROR:
        state.noticed.set()
        if state.ended.wait(_SAME_ERROR):
            with contextlib.suppress(OSError):
                _receive(state.links[number], 1)  # until the other process has ended
            return
    os.write(2, f"\nerror: {state.message}\n".encode())
    os._exit(1)


def _send(links: dict[int, socket.socket], kind: bytes, number: int) -> None:
    """Sends a message of a kind about process `number` to all others."""
    for link in links.values():
        with contextlib.suppress(OSError):
            link.sendall(kind + number.to_bytes(4))
