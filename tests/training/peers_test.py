"""The connections by which processes of a run notice that one has failed.

A new network namespace simulates two hosts whose connection is cut; without such
namespaces (containers may forbid them) the test is skipped.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from bpd_jax.training import distributed, peers
from tests.commands import ROOT, Done, Script, free_port

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
from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.training import distributed, peers

def main():
    address, count, index, victims, end = sys.argv[1:]
    if "LAST_SECONDS" in os.environ:
        peers._END = int(os.environ["LAST_SECONDS"])
    peers._SAME_ERROR = float(os.environ.get("SAME_ERROR_SECONDS", 10))
    distributed.initialize(address, int(count), int(index), timeout=60)
    with peers.watched():  # ends regularly
        pass
    with peers.watched():
        if end == "early" and index in victims:
            raise UserError(f"the disk of host {index} is full.")
        for step in range(10**6):
            try:
                distributed.agree(step)
            except Exception as error:
                if end != "save":
                    raise
                raise UserError("cannot write a checkpoint.") from error
            time.sleep(0.01)
            if step == 20 and index in victims:
                if end in ("kill", "save"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if end == "interrupt":
                    raise KeyboardInterrupt
                if end == "bug":
                    raise ZeroDivisionError
                raise UserError(f"the disk of host {index} is full.")

with cli.exit_on_errors():
    main()
"""
# Only processes that fail together need longer.
SHORT = {"SAME_ERROR_SECONDS": "2"}
# In "save" a process is killed while the others save.
ENDS = {
    "kill": -signal.SIGKILL,
    "save": -signal.SIGKILL,
    "interrupt": 130,
    "bug": 1,
    "error": 1,
    "early": 1,
}


def run(
    folder: pathlib.Path,
    code: str,
    count: int,
    *arguments: str,
    stderr: pathlib.Path | None = None,
    **environment: str,
) -> list[Done]:
    """Runs `code` in each process of a run, with address, count, index and more."""
    program = folder / "program.py"
    program.write_text(code)
    address = f"127.0.0.1:{free_port()}"
    processes = [
        Script(
            program,
            *(address, str(count), str(index), *arguments),
            folder=folder,
            environment={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **environment},
            err=stderr,
        )
        for index in range(count)
    ]
    # Less than jax's own limits, 100 seconds and more.
    return [process.wait(timeout=90) for process in processes]


@pytest.mark.parametrize(
    ("end", "victims"),
    [
        ("save", "2"),
        ("error", "012"),
        ("early", "1"),
        *(
            pytest.param(end, victim, marks=pytest.mark.exhaustive)
            for end in ENDS
            for victim in "01"
        ),
    ],
)
def test_a_failure_of_one_of_three_processes_is_one_sentence(
    end: str, victims: str, tmp_path: pathlib.Path
) -> None:
    alone = SHORT if len(victims) == 1 else {}
    results = run(tmp_path, PROCESS, 3, victims, end, **alone)
    for index, (status, _, text) in enumerate(results):
        failed = str(index) in victims
        assert status == (ENDS[end] if failed else 1), results
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        assert "stack trace" not in text
        assert ("Traceback" in text) == (failed and end == "bug"), text
        if failed:
            expected = f"error: the disk of host {index} is full."
            assert lines == ([expected] if end in ("error", "early") else [])
        else:
            [line] = lines
            died = end in ("kill", "save", "interrupt")
            ending = "has died" if died else "has ended with an error"
            assert line.startswith(f"error: process {victims} of this run {ending}")


@pytest.mark.parametrize(
    ("log", "end"),
    [
        ("device", "error"),
        ("pipe", "kill"),
        pytest.param("device", "kill", marks=pytest.mark.exhaustive),
        pytest.param("pipe", "error", marks=pytest.mark.exhaustive),
    ],
)
def test_processes_end_although_their_log_is_full(
    log: str, end: str, tmp_path: pathlib.Path
) -> None:
    path = pathlib.Path("/dev/full")
    with contextlib.ExitStack() as pipe:
        if log == "pipe":
            path = tmp_path / "pipe"
            os.mkfifo(path)
            for flag in (os.O_RDONLY, os.O_WRONLY):
                descriptor = os.open(path, flag | os.O_NONBLOCK)
                pipe.callback(os.close, descriptor)
            with contextlib.suppress(BlockingIOError):
                while os.write(descriptor, bytes(2**16)):
                    pass
        # Within 4 seconds a process that cannot write tries to end by itself.
        limits = {"LAST_SECONDS": "4", **SHORT}
        results = run(tmp_path, PROCESS, 3, "2", end, stderr=path, **limits)
    assert [result.returncode for result in results] == [1, 1, ENDS[end]]


# The save of process 0 fails while it adds digests, or makes the folder of the step,
# that of process 1 while it writes.
SAVES = """
import errno, os, resource, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from bpd_jax.base import cli
from bpd_jax.models.partitioning import MeshConfig, make_mesh
from bpd_jax.training import checkpoints, distributed, peers
from bpd_jax.training.state import TrainState

def main():
    address, count, index, victim, folder, fault = sys.argv[1:]
    peers._SAME_ERROR = float(os.environ.get("SAME_ERROR_SECONDS", 10))
    distributed.initialize(address, int(count), int(index), timeout=60)
    mesh = make_mesh(MeshConfig(data=2))
    values = np.random.default_rng(0).random(2**20, np.float32)

    def array(x, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])

    def fail(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    weights = {"w": array(values, "data")}
    state = TrainState(array(np.int32(1)), weights, {"m": weights["w"]})
    with peers.watched(), checkpoints.Checkpoints(folder) as saved:
        saved.save(1, state, {})
        saved.wait()
        if index == victim == "0" and fault == "seal":
            checkpoints.write_digests = fail
        if index == victim == "0" and fault == "folder":
            os.rename(folder, folder + ".old")
            open(folder, "w").close()
        if index == victim == "1":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        for step in range(2, 5):
            saved.save(step, state, {})
            distributed.agree(step)
        saved.wait()

with cli.exit_on_errors():
    main()
"""


@pytest.mark.parametrize(("victim", "fault"), [(0, "seal"), (0, "folder"), (1, "size")])
def test_a_failed_save_of_one_process_ends_both(
    tmp_path: pathlib.Path, victim: int, fault: str
) -> None:
    folder = tmp_path / "checkpoints"
    results = run(tmp_path, SAVES, 2, str(victim), str(folder), fault, **SHORT)
    assert [result.returncode for result in results] == [1, 1], results
    errors = [
        [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        for result in results
    ]
    assert len(errors[victim]) == len(errors[1 - victim]) == 1, results
    assert "cannot write a checkpoint" in errors[victim][0]
    assert f"process {victim} of this run has ended" in errors[1 - victim][0]
    first = tmp_path / "checkpoints.old" if fault == "folder" else folder
    assert (first / "1").is_dir()


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


class Store:
    """The key-value store of a coordinator; `call` receives the address set in it."""

    def __init__(self, call: Callable[[int, str], object] | None = None) -> None:
        self.call = call
        self.value = ""

    def key_value_set(self, key: str, value: str) -> None:
        assert key == "key"
        self.value = value
        if self.call is not None:
            self.call(*json.loads(value))

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        assert (key, timeout_in_ms) == ("key", 1000 * peers._CONNECT_TIMEOUT)
        if not self.value:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.value


def member(index: int, count: int, store: Store) -> distributed.Membership:
    return distributed.Membership(index, count, "127.0.0.1", store)


def test_unknown_connections_are_ignored() -> None:
    connections = []

    def connect(port: int, token: str) -> None:
        payloads = [b""] * 40 + [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 40]
        payloads += [bytes.fromhex(token) + index.to_bytes(4) for index in (2, 1)]
        for payload in payloads:
            connections.append(socket.create_connection(("127.0.0.1", port)))
            connections[-1].sendall(payload)

    links = peers._connect_all(member(0, 3, Store(connect)), "key")
    assert sorted(links) == [1, 2]
    assert [link.recv(1) for link in connections[-2:]] == [peers._WELCOME] * 2
    for link in [*links.values(), *connections]:
        link.close()


def test_processes_that_do_not_connect_are_not_watched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "_CONNECT_TIMEOUT", 0.1)
    assert peers._connect_all(member(0, 3, Store()), "key") == {}
    assert "warning: process 1, 2 could not connect" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400"])
def test_a_connection_without_a_welcome_is_not_watched(answer: bytes) -> None:
    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.value = json.dumps([server.getsockname()[1], "00"])

        def refuse() -> None:
            link, _ = server.accept()
            link.sendall(answer)
            link.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        assert peers._connect_to_first(member(1, 2, store), "key") == {}
        thread.join()
    # Process 0 has not published its address.
    assert peers._connect_to_first(member(1, 2, Store()), "key") == {}
