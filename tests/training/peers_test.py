"""The connections by which processes of a run notice that one has died.

A new network namespace stands for two hosts whose connection is cut; without such
namespaces (containers may forbid them) the test is skipped.
"""

import json
import subprocess
import sys

import pytest

from tests.commands import ROOT

UNSHARE = ["unshare", "--user", "--map-root-user", "--net"]
SCRIPT = """
import json, socket, subprocess, time
from bpd_jax.training import peers
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with socket.create_server(("127.0.0.1", 0)) as server:
    other = socket.create_connection(server.getsockname())
    link = peers._keep_alive(server.accept()[0])
other.sendall(b"x")
assert link.recv(1) == b"x"
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
began = time.monotonic()
try:
    end = repr(link.recv(1))
except OSError as error:
    end = error.strerror
print(json.dumps([end, time.monotonic() - began]))
"""


def namespaces() -> bool:
    """Whether a network namespace can be made."""
    try:
        command = [*UNSHARE, "ip", "link", "set", "lo", "up"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.exhaustive
@pytest.mark.skipif(not namespaces(), reason="no network namespaces here")
def test_a_host_that_is_lost_is_noticed_within_a_minute() -> None:
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    end, seconds = json.loads(done.stdout)
    # The kernel's clock, which does not depend on the load of the machine.
    assert "timed out" in end or "unreachable" in end
    assert 20 < seconds < 60
