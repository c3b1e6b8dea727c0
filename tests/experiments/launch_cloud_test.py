"""The launcher with a fake gcloud that replays states and failures.

The commands that it sends to workers run in a folder that replaces a worker's home: the
source arrives there as a git bundle, and training is a small program.
"""

import dataclasses
import fcntl
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import pytest

from bpd_jax.base.errors import UserError
from experiments.launch import tpu_slice
from experiments.launch.commands import run
from experiments.launch.detached import BUSY
from experiments.launch.tpu_keep import Keeper, Patience, stop_runs
from experiments.launch.tpu_slice import TpuSlice
from experiments.launch.tpu_state import read_status

ROOT = pathlib.Path(__file__).parent.parent.parent
SLICE = TpuSlice("paper", "zone", "v5e:4x4", "10.0.0.2:/runs", spot=True)

# Answers `describe` by the next line of `states`, and runs what is sent to workers in
# `home`. An exit status in the file of a verb, if there is one, comes first. Without
# the packages of the environment Python starts faster.
GCLOUD = """#!{python} -IS
import pathlib, shutil, subprocess, sys
cloud = pathlib.Path({cloud!r})
words = sys.argv[1:]
verb = words[3]
command = next((w[10:] for w in words if w.startswith("--command=")), "")
about = verb if verb != "ssh" else next(
    (n for n in ("start", "follow", "report", "stop") if "bpd_jax_run " + n in command),
    "setup")
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
if trouble == 255 and about == "follow":
    # The connection breaks while the log is followed.
    process = subprocess.Popen(["bash", "-c", command], cwd=cloud / "home")
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
    sys.exit(255)
if trouble:
    sys.exit(trouble)
if verb == "scp":
    shutil.copy(words[4], cloud / "home" / words[5].partition(":")[2])
elif verb == "ssh":
    sys.exit(subprocess.run(["bash", "-c", command], cwd=cloud / "home").returncode)
"""

# "Trains" one step, once the file `wait` is gone.
TRAIN = """
import pathlib, sys, time
home = pathlib.Path.home()
print("training", flush=True)
while (home / "wait").exists():
    time.sleep(0.02)
with (home / "share" / "steps").open("a") as steps:
    steps.write("step\\n")
sys.exit(1 if (home / "fails").exists() else 0)
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """A folder with `home`, `log`, and the files that determine gcloud's answers."""
    if shutil.which("flock") is None:
        pytest.skip("no flock here")
    home, tools, source = tmp_path / "home", tmp_path / "tools", tmp_path / "source"
    launch = source / "experiments" / "launch"
    launch.mkdir(parents=True)
    shutil.copy(ROOT / "experiments" / "launch" / "detached.py", launch)
    (launch / "tpu_setup.sh").write_text(f'touch "{home}/mounted"\n')
    (source / "train.py").write_text(TRAIN)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(source)]
    bundle = str(tmp_path / "x.bundle")
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        ["commit", "-qm", "one"],
        ["bundle", "create", "-q", bundle, "HEAD"],
    ):
        subprocess.run([*git, *arguments], check=True)
    (home / "share").mkdir(parents=True)
    tools.mkdir()
    gcloud = GCLOUD.format(python=sys.executable, cloud=str(tmp_path))
    mountpoint = f'#!/bin/sh\ntest "$2" = share && test -e "{home}/mounted"\n'
    for name, text in {"gcloud": gcloud, "mountpoint": mountpoint}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tpu_slice, "WAIT", 0)
    yield tmp_path
    (home / "wait").unlink(missing_ok=True)
    if (home / "bpd_jax").exists():
        run(SLICE.stop())
        run(SLICE.follow())


def keep(cloud, retries=0, requests=3, name="run", sleep=time.sleep):
    patience = Patience(retries, requests, pause=0.05)
    status = functools.partial(read_status, SLICE, pause=0)
    keeper = Keeper(SLICE, run, status, patience, sleep=sleep)
    prepare = SLICE.prepare(str(cloud / "x.bundle"))
    keeper.train(prepare, (sys.executable, "train.py"), name)


def requests_of(cloud):
    return [line for line in (cloud / "log").read_text().split() if line != "describe"]


def steps(cloud):
    return (cloud / "home" / "share" / "steps").read_text().count("step")


def finish_after(cloud, follows):
    """Lets the run end once its log has been followed `follows` times."""

    def finish():
        while requests_of(cloud).count("follow") < follows:
            time.sleep(0.02)
        (cloud / "home" / "wait").unlink()

    thread = threading.Thread(target=finish, daemon=True)
    thread.start()
    return thread


ROUND = ["scp", "setup", "start", "follow"]


@pytest.mark.exhaustive
def test_long_outage_ends_neither_run_nor_launcher(cloud):
    (cloud / "home" / "wait").touch()
    (cloud / "follow").write_text("255")
    (cloud / "log").touch()
    states = ["ACTIVE", "READY"] * 2 + ["UNREACHABLE"] * 15
    (cloud / "states").write_text("\n".join(states))
    finisher = finish_after(cloud, 2)
    keep(cloud, requests=10)
    finisher.join()
    assert requests_of(cloud) == [*ROUND, "follow"]
    assert steps(cloud) == 1


def test_second_launcher_waits_for_the_run_of_a_killed_one(cloud):
    (cloud / "home" / "wait").touch()
    (cloud / "follow").write_text("255")
    # The first one starts the run, loses the connection, and gives up at once.
    with pytest.raises(UserError, match="could not be reached"):
        keep(cloud, requests=0, name="first")
    finisher = finish_after(cloud, 2)
    keep(cloud, name="second")
    finisher.join()
    # The second launcher waits for that run, then starts its own.
    assert requests_of(cloud)[4:] == ["scp", "setup", "follow", *ROUND]
    assert steps(cloud) == 2


def test_a_failed_run_is_stopped_in_the_pause_of_the_launcher(cloud):
    (cloud / "home" / "fails").touch()
    with pytest.raises(UserError, match="was stopped"):
        keep(cloud, retries=3, sleep=lambda _: run(SLICE.stop()))
    assert requests_of(cloud) == [*ROUND, "stop", "report", *ROUND[:3]]
    assert steps(cloud) == 1
    (cloud / "home" / "fails").unlink()
    keep(cloud, name="another")
    assert steps(cloud) == 2


def test_stop_skips_slices_that_are_not_ready(cloud, capsys):
    for command in SLICE.prepare(str(cloud / "x.bundle")):
        assert run(command) == 0
    states = ["WAITING_FOR_RESOURCES", "NOT_FOUND", "READY", "READY"]
    (cloud / "states").write_text("\n".join(states))
    tpus = [dataclasses.replace(SLICE, name=f"paper-{i}") for i in range(3)]
    stop_runs(tpus, pause=0)
    assert requests_of(cloud).count("stop") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "nothing" in line] == [
        "# paper-0 is WAITING_FOR_RESOURCES: nothing was stopped",
        "# paper-1 does not exist: nothing was stopped",
    ]


def test_setup_does_not_disturb_a_run(cloud):
    (cloud / "home" / "bpd_jax_run").mkdir()
    [_, setup] = SLICE.prepare(str(cloud / "x.bundle"))
    with (cloud / "home" / "bpd_jax_run" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(setup) == BUSY
    assert not (cloud / "home" / "mounted").exists()


def test_nothing_is_written_to_an_unmounted_share(cloud):
    for command in SLICE.prepare(str(cloud / "x.bundle")):
        assert run(command) == 0
    (cloud / "home" / "mounted").unlink()
    assert run(SLICE.start(("true",), "1")) != 0
    assert run(SLICE.copy_data("gs://bucket/rows", "w")) != 0
    assert list((cloud / "home" / "share").iterdir()) == []
