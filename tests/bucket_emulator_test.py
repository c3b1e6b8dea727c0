"""Files, folders and checkpoints in a storage emulator that others wrote."""

import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.commands import ROOT

BUCKET = "gs://bpd-test"
# In a new process, because a process looks for its server once.
PROGRAM = """
import os, sys
import jax, numpy as np
from bpd_jax import files
from bpd_jax.buckets import as_path
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.training.checkpoints import Checkpoints, load_parameters
from bpd_jax.training.state import init_state
from tests.formats.artifacts import RUN, _abstract_state, _optimizer
from tests.formats.ngrams import _counts

bucket = sys.argv[1]
large = os.urandom(9 << 20)
with files.replacing_file(f"{bucket}/large") as path:
    path.write_bytes(large)
assert as_path(f"{bucket}/large").read_bytes() == large

for _ in range(2):  # The second replaces the first.
    estimate_katz(_counts()).save(f"{bucket}/ngram")
model = load_model(f"{bucket}/ngram")
assert model.order == 3

state = init_state(RUN, _optimizer(), _abstract_state(), 0)
for step in (3, 6):
    with Checkpoints(f"{bucket}/checkpoints", keep=1) as checkpoints:
        checkpoints.save(step, state, {"position": step})
with Checkpoints(f"{bucket}/checkpoints", keep=1) as checkpoints:
    assert checkpoints.steps() == [6]
    assert checkpoints.restore_data()["position"] == 6
read = load_parameters(f"{bucket}/checkpoints", RUN)
jax.tree.map(np.testing.assert_array_equal, read, state.params)
print("equal")
"""


@pytest.fixture
def emulator(tmp_path: pathlib.Path) -> Iterator[str]:
    """The address of an emulator with an empty bucket."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = [str(pathlib.Path(sys.executable).parent / "gcp-storage-emulator")]
    words += ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory"]
    with (
        (tmp_path / "emulator.log").open("wb") as log,
        subprocess.Popen(
            [*words, "--default-bucket=bpd-test"], stdout=log, stderr=log
        ) as server,
    ):
        try:
            for _ in range(300):
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def test_what_is_written_is_read_back(emulator: str, tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, BUCKET],
        cwd=ROOT,
        env={
            **os.environ,
            "STORAGE_EMULATOR_HOST": emulator,
            "NO_GCE_CHECK": "true",
            "XDG_CACHE_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("equal\n")
