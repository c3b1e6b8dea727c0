"""Launches on TPU slices: what would be run, and that it goes on whatever happens."""

import fcntl
import os
import pathlib
import shlex
import shutil
import subprocess

import pytest

from bpd_jax.compilation import chips
from bpd_jax.errors import UserError
from experiments.launch import tpu_slice
from experiments.launch.tpu_slice import BUSY, KINDS, TpuSlice

ROOT = pathlib.Path(__file__).parent.parent.parent
PRETRAIN = "--gin_file=gin_configs/runs/pretrain.gin"
V4 = "--gin_file=gin_configs/meshes/v4_128.gin"
SLICE = TpuSlice("paper", "us-central2-b", "v4:4x4x4", "10.0.0.2:/runs", spot=True)
OF_SLICE = [
    "--name=paper",
    "--zone=us-central2-b",
    "--share=10.0.0.2:/runs",
    "--workdir=blockwise_1b5",
]
FINETUNE = [
    "--gin_file=gin_configs/runs/finetune.gin",
    "--gin_file=gin_configs/tasks/squad.gin",
    "--gin_file=gin_configs/meshes/finetune_8.gin",
    "--gin.START='runs/base'",
]


def test_tpu_dry_run(dry_run):
    good, *bad = dry_run(
        "experiments.launch.tpu",
        [
            *OF_SLICE,
            "--topology=v4:4x4x4",
            "--spot",
            "--data=gs://bucket/rows",
            PRETRAIN,
            V4,
            "--gin.SEED=3",
            "--dry_run",
        ],
        [*OF_SLICE, "--topology=v9:4x4", PRETRAIN, "--dry_run"],
        [*OF_SLICE, "--topology=v5e:4x4x4", PRETRAIN, "--dry_run"],
        [*OF_SLICE, "--topology=v5e:4x4", PRETRAIN, V4, "--dry_run"],
        [*OF_SLICE, "--topology=v4:4x4x4", PRETRAIN, "--gin.SEDE=3", "--dry_run"],
        [*OF_SLICE, "--topology=v4:4x4x4", "--dry_run"],
        ["--topology=v4:4x4x4", PRETRAIN, "--dry_run"],
        [*OF_SLICE, "--topology=v4:4x4x4", PRETRAIN, "--workdir=/x", "--dry_run"],
        [*OF_SLICE, "--topology=v5e:2x4", *FINETUNE, "--dry_run"],
    )
    assert good.returncode == 0, good.stderr
    commands = [
        shlex.split(line)
        for line in good.stdout.splitlines()
        if line[:1] not in ("", "#")
    ]
    verbs = [
        words[4] if words[0] == "gcloud" else " ".join(words[:2]) for words in commands
    ]
    assert verbs == ["git -C", "create", "scp", "ssh", "ssh", "ssh", "delete"]
    assert {"--type=v4", "--topology=4x4x4", "--spot"} <= set(commands[1])
    remote = [words[-2].partition("=")[2] for words in commands[3:6]]
    assert commands[0][2:5] == [str(ROOT), "bundle", "create"]
    assert commands[0][5] == commands[2][5]
    assert "tpu_setup.sh 10.0.0.2:/runs" in remote[0]
    assert "rsync -r gs://bucket/rows share/blockwise_1b5/data" in remote[1]
    assert "--worker=0" in commands[4]
    assert "--worker=all" in commands[5]
    # What the shell of a worker makes of it.
    trained = shlex.split(remote[2].partition("bpd_jax.lock ")[2])
    assert trained == [
        ".venv/bin/python",
        "-m",
        "bpd_jax.train",
        PRETRAIN,
        V4,
        "--gin_bindings=SEED = 3",
        "--workdir=../share/blockwise_1b5",
        "--distributed",
    ]
    for done, words in zip(
        bad,
        [
            "--topology=v9:4x4 is not known",
            "--topology=v5e:4x4x4 is no slice that Cloud gives",
            "MeshConfig asks for data × fsdp × model = -1 × 64 × 1, but there are 16",
            "nothing uses SEDE; did you mean SEED",
            "--gin_file is missing",
            "--name is missing",
            "--workdir=/x must be a folder within the share",
            "TrainConfig.start = 'runs/base' is no folder of the workers: put it on",
        ],
        strict=True,
    ):
        assert done.returncode == 1
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_v4_chip_is_one_device_or_two():
    assert SLICE.devices == (64, 128)
    assert TpuSlice("a", "b", "v4-megacore:4x4x8", "h:/r").devices == (128,)
    assert TpuSlice("a", "b", "v5e:16x16", "h:/r").devices == (256,)
    assert KINDS.keys() == chips.CHIPS.keys()


@pytest.mark.parametrize(
    "topology",
    [
        "v4:4x4",
        "v5e:4x4x4",
        "v4:0x4x4",
        "v4:3x5x7",
        "v4:8x4x4",
        "v6e:3x3",
        "v5p:4",
        "v4",
    ],
)
def test_slices_that_cloud_does_not_give_are_refused(topology):
    with pytest.raises(UserError, match=f"--topology={topology} is no slice"):
        TpuSlice("a", "b", topology, "h:/r")


@pytest.mark.parametrize("topology", ["v4:2x2x1", "v4:8x8x12", "v5p:4x4x8", "v6e:1x1"])
def test_slices_that_cloud_gives(topology):
    assert TpuSlice("a", "b", topology, "h:/r").topology == topology


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker's home folder, and a function that runs a command's script there."""
    home, tools, source = tmp_path / "home", tmp_path / "tools", tmp_path / "source"
    setup = source / "experiments" / "launch" / "tpu_setup.sh"
    setup.parent.mkdir(parents=True)
    setup.write_text(f'echo "set up $1" >> "{home}/log"\n')
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(source)]
    (home / "share").mkdir(parents=True)
    bundle = str(home / "bpd_jax.bundle")
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["commit", "-qm", "one"],
        ["bundle", "create", "-q", bundle, "HEAD"],
    ):
        subprocess.run([*git, *words], check=True)
    tools.mkdir()
    mountpoint = tools / "mountpoint"
    mountpoint.write_text(f'#!/bin/sh\ntest "$2" = share && test -e "{home}/mounted"\n')
    mountpoint.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)

    def run(command):
        script = next(
            word.removeprefix("--command=")
            for word in command.words
            if word.startswith("--command=")
        )
        return subprocess.run(["bash", "-c", script], cwd=home, check=False).returncode

    return home, run


TRAIN = SLICE.train(("bash", "-c", "echo trained >> ../log"))


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock here")
def test_both_set_up_and_training_wait_for_a_run_that_is_at_work(worker, monkeypatch):
    home, run = worker
    setup = SLICE.prepare("x.bundle")[1]
    for command in (setup, TRAIN):
        works = "echo held; sleep 1; echo done >> log"
        with subprocess.Popen(
            ["flock", "bpd_jax.lock", "-c", works], cwd=home, stdout=subprocess.PIPE
        ) as run_before:
            assert run_before.stdout.readline() == b"held\n"
            assert run(command) == 0
        (home / "mounted").touch()
    done = ["done", "set up 10.0.0.2:/runs", "done", "trained"]
    assert (home / "log").read_text().splitlines() == done
    # It is not waited for forever.
    monkeypatch.setattr(tpu_slice, "WAIT", 0)
    with (home / "bpd_jax.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(SLICE.prepare("x.bundle")[1]) == BUSY


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock here")
def test_nothing_is_written_beside_the_share(worker):
    home, run = worker
    assert run(SLICE.prepare("x.bundle")[1]) == 0
    assert run(TRAIN) != 0
    assert run(SLICE.copy_data("gs://bucket/rows", "w")) != 0
    assert list((home / "share").iterdir()) == []
    (home / "mounted").touch()
    assert run(TRAIN) == 0
    assert (home / "log").read_text() == "set up 10.0.0.2:/runs\ntrained\n"


def test_a_worker_is_set_up(tmp_path):
    script = tmp_path / "code" / "experiments" / "launch" / "tpu_setup.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "experiments" / "launch" / "tpu_setup.sh", script)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, does in {
        "mountpoint": f'test -e "{tmp_path}/mounted"',
        "sudo": f'case "$1" in mount) touch "{tmp_path}/mounted" ;; esac',
        "python3": f"""case "$*" in *" venv "*)
            mkdir -p .venv/bin && cp "{tools}/mountpoint" .venv/bin/python ;; esac""",
    }.items():
        (tools / name).write_text(
            f'#!/bin/sh\necho {name} "$*" >> "{tmp_path}/log"\n{does}\n'
        )
        (tools / name).chmod(0o755)
    words = ["bash", str(script), "10.0.0.2:/runs"]
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    for _ in range(2):
        environment = {**os.environ, "HOME": str(tmp_path), "PATH": path}
        subprocess.run(words, check=True, env=environment)
    log = (tmp_path / "log").read_text().splitlines()
    mounts = [line for line in log if line.startswith("sudo mount")]
    assert mounts == [f"sudo mount -t nfs -o rw,hard 10.0.0.2:/runs {tmp_path}/share"]
    # What docs/tpu.md has the figures of; newer Python gets another jax.
    made = [line for line in log if "uv venv" in line]
    assert made == ["python3 -m uv venv --quiet --seed --python 3.11 .venv"]
