"""Ends all processes of a run with a one-line error when one of them has died.

If a process is killed or its host is lost, the others wait for it in the middle of a
step until jax's heartbeats time out, and then end with a C++ stack trace. Therefore
process 0 keeps a TCP connection to every other process during training. A connection
that closes without a goodbye message means that its process has died; process 0 then
notifies the others. Nothing is saved: the next start resumes from the last checkpoint.
"""

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator

import jax

from bpd_jax.errors import UserError
from bpd_jax.training import distributed

# Messages: the sender ends regularly; the process whose number follows has died.
_GOODBYE, _DEATH = b".", b"!"

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
    for number in links:
        threading.Thread(target=_watch, args=(number, links), daemon=True).start()
    try:
        yield
    except (UserError, SystemExit, KeyboardInterrupt):
        _send(links, _GOODBYE)
        raise
    # After any other exception there is no goodbye: the other processes must end too.
    _send(links, _GOODBYE)


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


def _watch(number: int, links: dict[int, socket.socket]) -> None:
    """Waits for a message of process `number`; ends this process if one has died."""
    try:
        message = _receive(links[number], 1)
        if message == _GOODBYE:
            return
        dead = number
        if message == _DEATH:
            dead = int.from_bytes(_receive(links[number], 4))
    except OSError:
        dead = number
    if distributed.is_first():
        _send(links, _DEATH + dead.to_bytes(4))
    message = (
        f"\nerror: process {dead} of this run has died: see its own output; start the "
        "run again to resume from the last checkpoint.\n"
    ).encode()
    os.write(2, message)
    os._exit(1)


def _send(links: dict[int, socket.socket], message: bytes) -> None:
    for link in links.values():
        with contextlib.suppress(OSError):
            link.sendall(message)
