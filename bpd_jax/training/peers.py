"""Ends a process of a run at once, with one sentence, when another one has died.

A process that is killed, or whose host is lost, leaves the others waiting for it in the
middle of a step; jax ends them after its heartbeats time out, with a stack trace of
C++. Here process 0 holds a TCP connection to every other process for as long as they
train. A connection that breaks without a goodbye means a death, which process 0 passes
on. Nothing is saved: the next start resumes from the last checkpoint.
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

# What a process sends before it leaves, and before the number of one that has died.
_GOODBYE, _DEATH = b".", b"!"

# Seconds to wait for the others to connect, and for the answer of a silent host.
_PATIENCE, _SILENCE = 30, 20


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Watches the other processes of the run; does nothing where there are none.

    All processes enter together. A process whose connection cannot be made is not
    watched.
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
    # Any other exception is that of this process alone, whose end the others see.
    _send(links, _GOODBYE)


def _connect_all() -> dict[int, socket.socket]:
    """In process 0: a connection to every other process, by its number."""
    token = secrets.token_bytes(16)
    count = jax.process_count()
    links: dict[int, socket.socket] = {}
    with socket.create_server(("", 0), backlog=count) as server:
        server.settimeout(_PATIENCE)
        port = server.getsockname()[1]
        distributed.agree((distributed.own_host(), port, token.hex()))
        with contextlib.suppress(OSError):
            while len(links) < count - 1:
                link, _ = server.accept()
                link.settimeout(_PATIENCE)
                greeting = _receive(link, len(token) + 4)
                if greeting[: len(token)] != token:
                    link.close()
                    continue
                links[int.from_bytes(greeting[len(token) :])] = _lasting(link)
    return links


def _connect_to_first() -> dict[int, socket.socket]:
    """In any other process: the connection to process 0."""
    host, port, token = distributed.agree(("", 0, ""))
    try:
        link = socket.create_connection((host, port), timeout=_PATIENCE)
        link.sendall(bytes.fromhex(token) + jax.process_index().to_bytes(4))
    except OSError:
        return {}
    return {0: _lasting(link)}


def _lasting(link: socket.socket) -> socket.socket:
    """A connection that may be silent, and breaks soon after the other host is gone."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (
        ("TCP_KEEPIDLE", _SILENCE),
        ("TCP_KEEPINTVL", _SILENCE // 4),
        ("TCP_KEEPCNT", 4),
    ):
        # Not every system has them.
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return link


def _receive(link: socket.socket, count: int) -> bytes:
    """The next `count` bytes; fewer if the connection ends."""
    received = b""
    while len(received) < count and (more := link.recv(count - len(received))):
        received += more
    return received


def _watch(number: int, links: dict[int, socket.socket]) -> None:
    """Waits for what process `number` sends, and ends this process if it has died."""
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
    words = (
        f"\nerror: process {dead} of this run has died: its own output may say why; "
        "start the run again to resume from the last checkpoint.\n"
    )
    os.write(2, words.encode())
    os._exit(1)


def _send(links: dict[int, socket.socket], message: bytes) -> None:
    for link in links.values():
        with contextlib.suppress(OSError):
            link.sendall(message)
