"""Commands that write to a full disk, or to one that is mounted read-only.

A new mount namespace holds a file system of 256 kB; without such namespaces (containers
may forbid them) the tests are skipped.
"""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.commands import ROOT, call

# Defines `fill`, which fills a file system.
FILL = """
import json, pathlib, subprocess, sys
def fill(disk):
    with open(disk / "filler", "wb", buffering=0) as stream:
        try:
            while stream.write(bytes(4096)):
                pass
        except OSError:
            pass
"""
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
SCRIPT = """
disk, state, commands = pathlib.Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=True)
(disk / "result").mkdir()
(disk / "result" / "mine.txt").write_text("years of work")
(disk / "file").write_text("earlier")
if state == "full":
    fill(disk)
else:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
before = sorted(map(str, disk.rglob("*")))
from tests.commands import call
ends = []
for module, *flags in commands:
    done = call(module, *flags, folder=disk.parent)
    ends.append([module, done.returncode, done.stderr[-2000:]])
kept = (disk / "file").read_text() == "earlier"
print(json.dumps({"ends": ends, "same": before == sorted(map(str, disk.rglob("*"))),
                  "kept": kept}))
"""


def namespaces() -> bool:
    """Whether a mount namespace can be made."""
    try:
        command = [*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.exhaustive
@pytest.mark.skipif(not namespaces(), reason="no mount namespaces here")
@pytest.mark.parametrize("state", ["full", "read-only"])
def test_write_errors_are_reported_in_one_sentence(
    tmp_path: pathlib.Path, trained: pathlib.Path, state: str
) -> None:
    lines = [" ".join(str((i * j) % 50) for j in range(200)) for i in range(400)]
    (tmp_path / "ids.txt").write_text("\n".join(lines))
    count_result = call(
        *("bpd_jax.count_ngrams", "--tokens=ids.txt", "--order=4", "--output=counts"),
        folder=tmp_path,
    )
    assert count_result.returncode == 0, count_result.stderr
    disk = tmp_path / "disk"
    disk.mkdir()
    model = [f"--model={trained / 'run'}", "--prompt=3 times", "--max_new_tokens=8"]
    commands = [
        ["bpd_jax.count_ngrams", "--tokens=ids.txt", f"--output={disk}/counts"],
        ["bpd_jax.build_ngram", "--counts=counts", f"--output={disk}/model"],
        ["bpd_jax.decode", *model, f"--output={disk}/file"],
    ]
    result = subprocess.run(
        [
            *UNSHARE,
            sys.executable,
            "-c",
            FILL + SCRIPT,
            disk,
            state,
            json.dumps(commands),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    reason = "No space left" if state == "full" else "Read-only file system"
    for module, status, printed in report["ends"]:
        assert status == 1, (module, printed)
        assert "Traceback" not in printed
        assert reason in printed.splitlines()[-1], (module, printed)
    assert report["kept"]
    # A count on a full disk keeps what it has finished, so that it can resume.
    assert report["same"] or state == "full"
