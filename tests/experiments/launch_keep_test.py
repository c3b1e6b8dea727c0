"""The TPU launcher with a fake gcloud that replays states and failures.

The commands that it sends to workers run in a folder that replaces a worker's home: the
source arrives there as a git bundle, and the run is a small program.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import threading

import pytest

from bpd_jax.base.errors import UserError
from experiments.launch.command import Program, run
from experiments.launch.tpu_keep import Keeper, RunFailedError
from experiments.launch.tpu_slice import BUSY, FAILED, STOPPED, TpuSlice
from tests.commands import commit_all, wait_for

ROOT = pathlib.Path(__file__).parent.parent.parent
SLICE = TpuSlice("paper", "zone", "v5e:4x4", "10.0.0.2:/runs")
PROGRAM = Program("work", ())

# Answers `describe` by the next line of `states`, and runs what is sent to workers in
# `home`. An exit status in the file of a verb, if there is one, comes first.
GCLOUD = """#!{python} -IS
import pathlib, shutil, subprocess, sys
cloud = pathlib.Path({cloud!r})
words = sys.argv[1:]
verb = words[3]
command = next((w[10:] for w in words if w.startswith("--command=")), "")
about = verb if verb != "ssh" else next(
    (n for n in ("start", "follow", "stop") if "worker.sh " + n in command), "setup")
with (cloud / "log").open("a") as log:
    log.write(about + "\\n")
def next_line(name):
    file = cloud / name
    lines = file.read_text().splitlines() if file.exists() else []
    if lines:
        file.write_text("\\n".join(lines[1:]))
        return lines[0]
if verb == "describe":
    state = next_line("states") or "READY"
    if state == "UNREACHABLE":
        sys.exit("ERROR: the network is unreachable")
    if state == "NOT_FOUND":
        sys.exit("ERROR: NOT_FOUND: no such resource")
    print("ACTIVE" if state == "READY" and words[2] == "queued-resources" else state)
    sys.exit(0)
trouble = int(next_line(about) or 0)
if trouble:
    sys.exit(trouble)
if verb == "scp":
    shutil.copy(words[4], cloud / "home" / words[5].partition(":")[2])
elif verb == "ssh":
    sys.exit(subprocess.run(["bash", "-c", command], cwd=cloud / "home").returncode)
"""

# Works one step, once the file `wait` is gone.
WORK = """
import pathlib, sys, time
home = pathlib.Path.home()
print("working", flush=True)
while (home / "wait").exists():
    time.sleep(0.02)
with (home / "share" / "steps").open("a") as steps:
    steps.write("step\\n")
sys.exit(1 if (home / "fails").exists() else 0)
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """A folder with `home`, `log`, and the files that determine gcloud's answers."""
    if shutil.which("flock") is None or shutil.which("setsid") is None:
        pytest.skip("no flock or setsid here")
    home, tools, source = tmp_path / "home", tmp_path / "tools", tmp_path / "source"
    launch = source / "experiments" / "launch"
    launch.mkdir(parents=True)
    shutil.copy(ROOT / "experiments" / "launch" / "worker.sh", launch)
    (launch / "tpu_setup.sh").write_text(f'touch "{home}/mounted"\n')
    (source / "work.py").write_text(WORK)
    python = source / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    commit_all(source)
    bundle = ["git", "bundle", "create", "-q", str(tmp_path / "x.bundle"), "HEAD"]
    subprocess.run(bundle, cwd=source, check=True)
    (home / "share").mkdir(parents=True)
    tools.mkdir()
    gcloud = GCLOUD.format(python=sys.executable, cloud=str(tmp_path))
    mountpoint = f'#!/bin/sh\ntest "$2" = share && test -e "{home}/mounted"\n'
    for name, text in {"gcloud": gcloud, "mountpoint": mountpoint}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(home))
    yield tmp_path
    (home / "wait").unlink(missing_ok=True)
    if (home / "bpd_jax").exists():
        run(SLICE.follow())


def keep(cloud, retries=0, launch="one"):
    keeper = Keeper(SLICE, retries, pause=0.05)
    prepare = SLICE.prepare(str(cloud / "x.bundle"))
    keeper.keep(prepare, SLICE.start(PROGRAM, launch))


def requests_of(cloud):
    return [line for line in (cloud / "log").read_text().split() if line != "describe"]


def steps(cloud):
    return (cloud / "home" / "share" / "steps").read_text().count("step")


ROUND = ["scp", "setup", "start", "follow"]


def test_absent_slices_are_requested_and_lost_ones_replaced(cloud):
    # Requested and waited for; preempted while it is set up, deleted, requested again.
    (cloud / "setup").write_text("1")
    states = ["NOT_FOUND", "WAITING_FOR_RESOURCES", "READY", "READY"]
    states += ["SUSPENDED"] * 2 + ["DELETING", "NOT_FOUND"]
    (cloud / "states").write_text("\n".join(states))
    keep(cloud)
    again = ["delete", "create"]
    assert requests_of(cloud) == ["create", "scp", "setup", *again, *ROUND]
    assert steps(cloud) == 1


def test_lost_connections_are_restored_and_the_run_continues(cloud):
    (cloud / "follow").write_text("255")
    states = ["READY"] * 2 + ["UNREACHABLE"] * 2
    (cloud / "states").write_text("\n".join(states))
    keep(cloud)
    assert requests_of(cloud) == [*ROUND, "follow"]
    assert steps(cloud) == 1


def test_second_launcher_of_the_same_command_follows_the_run(cloud):
    (cloud / "home" / "wait").touch()
    first = threading.Thread(target=keep, args=(cloud,), daemon=True)
    first.start()
    wait_for(lambda: (cloud / "log").exists() and "follow" in requests_of(cloud))
    other = SLICE.start(Program("other", ()), "two")
    assert run(other) == BUSY
    second = threading.Thread(target=keep, args=(cloud, 0, "two"), daemon=True)
    second.start()
    wait_for(lambda: requests_of(cloud).count("follow") == 2)
    (cloud / "home" / "wait").unlink()
    for thread in (first, second):
        thread.join(30)
    assert steps(cloud) == 1


def test_failed_run_is_retried(cloud):
    (cloud / "home" / "fails").touch()
    with pytest.raises(RunFailedError, match=r"2 attempts failed, .* status 76"):
        keep(cloud, retries=1)
    assert requests_of(cloud) == [*ROUND, *ROUND]
    assert run(SLICE.follow()) == FAILED


def test_stop_ends_the_run_and_its_launcher(cloud):
    (cloud / "home" / "wait").touch()
    for command in SLICE.prepare(str(cloud / "x.bundle")):
        assert run(command) == 0
    start = SLICE.start(PROGRAM, "one")
    assert run(start) == 0
    assert run(start) == 0  # An earlier connection was lost.
    # While a run is in progress nothing is prepared.
    (cloud / "home" / "mounted").unlink()
    assert run(SLICE.stop()) == 0
    assert run(SLICE.follow()) == STOPPED
    # Nothing is written to a share that is not mounted.
    assert run(start) not in (0, STOPPED)
    (cloud / "home" / "mounted").touch()
    assert run(start) == STOPPED
    with pytest.raises(UserError, match="was stopped; the same command resumes"):
        keep(cloud)
    (cloud / "home" / "wait").unlink()
    # A new launcher starts a run that has ended again: training resumes.
    keep(cloud, launch="two")
    assert steps(cloud) == 1
