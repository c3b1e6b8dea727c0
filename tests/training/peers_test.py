"""The connections by which processes of a run notice that one has failed.

A new network namespace simulates two hosts whose connection is cut; without such
namespaces (containers may forbid them) the test is skipped.
"""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from bpd_jax.training import peers
from tests.commands import ROOT

UNSHARE = ["unshare", "--user", "--map-root-user", "--net"]
SCRIPT = """
import json, socket, subprocess, time
from bpd_jax.training import peers
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with socket.create_server(("127.0.0.1", 0)) as server:
    client = socket.create_connection(server.getsockname())
    link = peers._keep_alive(server.accept()[0])
client.sendall(b"x")
assert link.recv(1) == b"x"
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
began = time.monotonic()
try:
    end = repr(link.recv(1))
except OSError as error:
    end = error.strerror
print(json.dumps([end, time.monotonic() - began]))
"""


# A process of a run that only calls `agree`, in a loop.
PROCESS = """
import os, signal, sys, time
from bpd_jax import cli
from bpd_jax.errors import UserError
from bpd_jax.training import distributed, peers

def main():
    address, count, index, victims, end = sys.argv[1:]
    distributed.initialize(address, int(count), int(index), timeout=60)
    with peers.watched():
        for step in range(10**6):
            distributed.agree(step)
            time.sleep(0.01)
            if step == 20 and index in victims:
                if end == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if end == "interrupt":
                    raise KeyboardInterrupt
                if end == "bug":
                    raise ZeroDivisionError
                raise UserError(f"the disk of host {index} is full.")

with cli.telling_errors():
    main()
"""
ENDS = {"kill": -signal.SIGKILL, "interrupt": 130, "bug": 1, "error": 1}


@pytest.mark.parametrize(
    ("end", "victims"),
    [
        ("kill", "2"),
        ("error", "012"),
        *(
            pytest.param(end, victim, marks=pytest.mark.exhaustive)
            for end in ENDS
            for victim in "01"
        ),
    ],
)
def test_a_failure_of_one_of_three_processes_is_one_sentence(
    end: str, victims: str
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, "3", str(index), victims, end],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(3)
    ]
    # Less than jax's own limits, 100 seconds and more.
    printed = [process.communicate(timeout=90)[1] for process in processes]
    for index, (process, text) in enumerate(zip(processes, printed, strict=True)):
        failed = str(index) in victims
        assert process.returncode == (ENDS[end] if failed else 1), printed
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        assert "stack trace" not in text
        assert ("Traceback" in text) == (failed and end == "bug"), text
        if failed:
            expected = f"error: the disk of host {index} is full."
            assert lines == ([expected] if end == "error" else [])
        else:
            [line] = lines
            ending = (
                "has ended with an error" if end in ("bug", "error") else "has died"
            )
            assert line.startswith(f"error: process {victims} of this run {ending}")


def namespaces() -> bool:
    """Whether a network namespace can be made."""
    try:
        command = [*UNSHARE, "ip", "link", "set", "lo", "up"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.exhaustive
@pytest.mark.skipif(not namespaces(), reason="no network namespaces here")
def test_lost_host_is_detected_within_a_minute() -> None:
    result = subprocess.run(
        [*UNSHARE, sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    end, seconds = json.loads(result.stdout)
    # The kernel's clock, which does not depend on the load of the machine.
    assert "timed out" in end or "unreachable" in end
    assert 20 < seconds < 60


def test_unknown_connections_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = []

    def connect(value: tuple[str, int, str]) -> None:
        _, port, token = value
        payloads = [b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 40]
        payloads += [bytes.fromhex(token) + index.to_bytes(4) for index in (2, 1)]
        for payload in payloads:
            connections.append(socket.create_connection(("127.0.0.1", port)))
            connections[-1].sendall(payload)

    monkeypatch.setattr(peers.jax, "process_count", lambda: 3)
    monkeypatch.setattr(peers.distributed, "agree", connect)
    monkeypatch.setattr(peers, "_GREETING_TIMEOUT", 0.2)
    links = peers._connect_all()
    assert sorted(links) == [1, 2]
    for link in [*links.values(), *connections]:
        link.close()
