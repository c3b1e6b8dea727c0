"""Commands that write to a full disk, or to one that is mounted read-only.

A new mount namespace holds a file system of 256 kB; without such namespaces (containers
may forbid them) the tests are skipped.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.commands import ROOT, call

# Defines `fill`, which fills a file system.
FILL = """
import json, os, pathlib, subprocess, sys, time
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


# A run whose disk is filled after its first checkpoint, and which is restarted when
# there is space.
TRAINING = """
disk, command = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", disk], check=True)
saved = disk / "run" / "checkpoints"
pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
with subprocess.Popen(command, **pipe) as run:
    while run.poll() is None and not (saved / "50").exists():
        time.sleep(0.01)
    fill(disk)
    _, errors = run.communicate(timeout=200)
first = run.returncode, errors[-1000:], sorted(os.listdir(saved))
(disk / "filler").unlink()
again = subprocess.run(command, check=False, **pipe)
print(json.dumps([first, [again.returncode, again.stdout, sorted(os.listdir(saved))]]))
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


@pytest.mark.exhaustive
@pytest.mark.skipif(not namespaces(), reason="no mount namespaces here")
def test_training_resumes_after_the_disk_was_full(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("seqio")
    (tmp_path / "disk").mkdir()
    for number in range(12):
        lines = [f"{number} times {k} is {number * k}." for k in range(20)]
        (tmp_path / f"{number}.txt").write_text("\n".join(lines))
    command = [
        *(sys.executable, "-m", "bpd_jax.train", "--gin_file=benchmarks/kill.gin"),
        "--gin.STEPS=400",
        f"--gin.TEXT_FILES='{tmp_path}/*.txt'",
        f"--workdir={tmp_path}/disk/run",
    ]
    program = [
        sys.executable,
        "-c",
        FILL + TRAINING,
        tmp_path / "disk",
        json.dumps(command),
    ]
    result = subprocess.run(
        [*UNSHARE, *program],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": ""},  # one device
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (status, printed, saved), (resumed_status, output, at_end) = json.loads(
        result.stdout
    )
    assert status == 1, printed
    assert "Traceback" not in printed
    last = printed.strip().splitlines()[-1]
    assert "No space left on device; the newest complete checkpoint is that of" in last
    assert "50" in saved
    assert resumed_status == 0
    newest = max(int(name) for name in saved if name.isdigit())
    assert f"run: steps {newest} to 400" in output
    assert "400" in at_end
