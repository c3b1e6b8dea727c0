"""Files and folders in gcp-storage-emulator, a third-party server.

Checkpoints in a bucket are tested with `fake_storage` (bucket_runs_test), because the
emulator ignores the conditions of uploads, which TensorStore needs.
"""

import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.commands import free_port, python

BUCKET = "gs://bpd-test"
# In a new process, because clients look up the server once per process.
PROGRAM = """
import os, sys
from bpd_jax.storage import files
from bpd_jax.storage.buckets import as_path
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.ngrams.katz import estimate_katz
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

print("equal")
"""


# Writes folders of four files, and reads them; SIGKILL comes instead of upload KILL.
WRITER = """
import os, signal, sys
import numpy as np
from bpd_jax.storage import artifacts, buckets, folders
from bpd_jax.storage.buckets import as_path
from bpd_jax.base.errors import UserError

value, kill, *names = sys.argv[1:]
kind = artifacts.Artifact("a letter", "letter.json", ("*.npz",), remedy="write it anew")
upload, uploads = buckets.upload, []

def counted(*arguments):
    uploads.append(arguments)
    if len(uploads) == int(kill):
        os.kill(os.getpid(), signal.SIGKILL)
    return upload(*arguments)

buckets.upload = counted
for folder in names:
    if int(value):
        with folders.replacing_folder(folder, kind) as temporary:
            for number in range(3):
                np.savez(temporary / f"{number}.npz", x=np.full(4, int(value)))
            kind.write_header(temporary, {"count": 3})
    try:
        kind.read_header(folder)
    except UserError as error:
        print(error)
    else:
        for number in range(3):
            with np.load(as_path(f"{folder}/{number}.npz")) as arrays:
                print(*arrays["x"].tolist())
"""


@pytest.fixture
def emulator(tmp_path: pathlib.Path) -> Iterator[str]:
    """The address of an emulator with an empty bucket."""
    port = free_port()
    command = [sys.executable, "-m", "gcp_storage_emulator", "start"]
    command += ["--host=127.0.0.1", f"--port={port}", "--in-memory"]
    with (
        (tmp_path / "emulator.log").open("wb") as log,
        subprocess.Popen(
            [*command, "--default-bucket=bpd-test"], stdout=log, stderr=log
        ) as server,
    ):
        try:
            for _ in range(300):
                assert server.poll() is None, (tmp_path / "emulator.log").read_text()
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def run(
    emulator: str, cache: pathlib.Path, program: str, *arguments: object
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new process, whose bucket is the emulator's."""
    return python(
        *("-c", program, *map(str, arguments)),
        STORAGE_EMULATOR_HOST=emulator,
        NO_GCE_CHECK="true",
        XDG_CACHE_HOME=str(cache),
    )


def test_files_and_models_round_trip(emulator: str, tmp_path: pathlib.Path) -> None:
    result = run(emulator, tmp_path, PROGRAM, BUCKET)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("equal\n")


def test_interrupted_upload_is_refused_and_replaced(
    emulator: str, tmp_path: pathlib.Path
) -> None:
    """Each folder is written again by a process that is killed in another upload."""
    kills = {f"{BUCKET}/letter_{kill}": kill for kill in (1, 2, 4)}
    assert run(emulator, tmp_path, WRITER, 1, 0, *kills).stdout == "1 1 1 1\n" * 9
    for folder, kill in kills.items():
        killed = run(emulator, tmp_path, WRITER, 2, kill, folder)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    read = run(emulator, tmp_path / "another machine", WRITER, 0, 0, *kills)
    assert read.returncode == 0, read.stderr
    lines = read.stdout.splitlines()
    assert ["interrupted" in line for line in lines] == [True] * 3
    assert run(emulator, tmp_path, WRITER, 3, 0, *kills).stdout == "3 3 3 3\n" * 9
