"""Launches: what would be run, and that it goes on after whatever happens."""

import os
import pathlib
import shlex
import shutil
import subprocess

import pytest

from bpd_jax.errors import UserError
from experiments.launch.checks import check_run, check_travels
from experiments.launch.commands import train_words
from experiments.launch.slurm_script import SlurmJob, batch_script
from experiments.launch.tpu_slice import TpuSlice, keep_training

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


def assert_refused(done, words):
    assert done.status == 1
    assert words in done.err
    assert done.err.count("\n") == 1


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
        [*OF_SLICE, "--topology=v5e:4x4", PRETRAIN, V4, "--dry_run"],
        [*OF_SLICE, "--topology=v4:4x4x4", PRETRAIN, "--gin.SEDE=3", "--dry_run"],
        [*OF_SLICE, "--topology=v4:4x4x4", "--dry_run"],
        ["--topology=v4:4x4x4", PRETRAIN, "--dry_run"],
        [*OF_SLICE, "--topology=v4:4x4x4", PRETRAIN, "--workdir=/x", "--dry_run"],
    )
    assert good.status == 0, good.err
    commands = [
        shlex.split(line) for line in good.out.splitlines() if line[:1] not in ("", "#")
    ]
    verbs = [
        words[4] if words[0] == "gcloud" else " ".join(words[:2]) for words in commands
    ]
    assert verbs == ["create", "git bundle", "scp", "ssh", "ssh", "ssh", "delete"]
    assert {"--type=v4", "--topology=4x4x4", "--spot"} <= set(commands[0])
    remote = [words[-2].partition("=")[2] for words in commands[3:6]]
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
            "MeshConfig asks for data × fsdp × model = -1 × 64 × 1, but there are 16",
            "nothing uses SEDE; did you mean SEED",
            "--gin_file is missing",
            "--name is missing",
            "--workdir=/x must be a folder within the share",
        ],
        strict=True,
    ):
        assert_refused(done, words)


def test_a_v4_chip_is_one_device_or_two():
    assert SLICE.devices == (64, 128)
    assert TpuSlice("a", "b", "v5e:16x16", "h:/r").devices == (256,)


class Cloud:
    """Answers commands as told, and keeps what it was asked."""

    def __init__(self, states, trainings, creations=()):
        self.states, self.trainings = list(states), list(trainings)
        self.creations = list(creations)
        self.asked = []
        self.waited = 0.0

    def run(self, command):
        verb = command.words[4] if command.words[0] == "gcloud" else "bundle"
        verb = "train" if "bpd_jax.train" in str(command) else verb
        self.asked.append(verb)
        if verb == "train":
            return self.trainings.pop(0)
        return self.creations.pop(0) if verb == "create" and self.creations else 0

    def state(self):
        return self.states.pop(0)

    def sleep(self, seconds):
        self.waited += seconds

    def keep(self, retries=1):
        words = train_words("python", ["a.gin"], [], "w")
        keep_training(
            SLICE,
            SLICE.train(words),
            SLICE.prepare(),
            self.run,
            self.state,
            retries=retries,
            pause=5,
            sleep=self.sleep,
        )
        return self.asked


PREPARED = ["bundle", "scp", "ssh"]


def test_trains_on_a_new_slice_to_the_end():
    assert Cloud([""], [0]).keep() == ["create", *PREPARED, "train"]


def test_goes_on_with_a_slice_that_is_there():
    cloud = Cloud(["READY"], [0])
    assert cloud.keep() == [*PREPARED, "train"]


def test_replaces_a_slice_that_was_taken_back_however_often():
    cloud = Cloud(["", "PREEMPTED", "PREEMPTED"], [1, 1, 0], creations=[0, 1, 1, 0, 0])
    again = ["delete", "create", *PREPARED, "train"]
    asked = cloud.keep(retries=0)
    assert asked == [
        *("create", *PREPARED, "train"),
        *("delete", "create", "create", *again[1:]),
        *again,
    ]
    assert cloud.waited == 10


def test_a_slice_that_was_taken_back_before_is_replaced_first():
    cloud = Cloud(["PREEMPTED"], [0])
    assert cloud.keep() == ["delete", "create", *PREPARED, "train"]


def test_gives_up_on_training_that_fails_by_itself():
    cloud = Cloud(["", "READY", "READY"], [1, 1])
    with pytest.raises(UserError, match="ended with an error 2 times"):
        cloud.keep(retries=1)
    assert cloud.asked.count("train") == 2


def test_says_what_it_could_not_do():
    with pytest.raises(UserError, match="could not ask for the slice: gcloud ended"):
        Cloud([""], [], creations=[1]).keep()


def test_slurm_dry_run(dry_run):
    mesh = "--gin_file=gin_configs/meshes/gpu_8.gin"
    good, *bad = dry_run(
        "experiments.launch.slurm",
        [PRETRAIN, mesh, "--workdir=/w", "--nodes=4", "--sbatch=-p long", "--dry_run"],
        [PRETRAIN, mesh, "--workdir=/w", "--gpus=6", "--dry_run"],
        [PRETRAIN, mesh, "--workdir=/w", "--nodes=3", "--dry_run"],
        [PRETRAIN, mesh, "--workdir=/w", "--sbatch=long", "--dry_run"],
        [PRETRAIN, mesh, "--workdir=/w", "--name=a b", "--dry_run"],
        [PRETRAIN, mesh, "--dry_run"],
    )
    assert good.status == 0, good.err
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n" in good.out
    assert "#SBATCH -p long\n" in good.out
    for done, words in zip(
        bad,
        [
            "MeshConfig asks for data × fsdp × model = -1 × 8 × 1, but there are 6",
            "TrainConfig.batch_size = 2048 is not a multiple of",
            "--sbatch=long is no option of sbatch",
            "--name=a b",
            "--workdir is missing",
        ],
        strict=True,
    ):
        assert_refused(done, words)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder with commands of SLURM's names; each writes down how it was called."""

    def make(status):
        for name, code in (("srun", status), ("scontrol", 0)):
            file = tmp_path / name
            file.write_text(
                f'#!/usr/bin/env bash\nprintf "%s\\n" {name} "$@" '
                f'"ids=$JAX_LOCAL_DEVICE_IDS" >> "{tmp_path}/log"\nexit {code}\n'
            )
            file.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setenv("SLURM_JOB_ID", "77")

    return make


POINTS = [train_words("python", ["a.gin"], [f"S = 'x{n} y'"], f"w{n}") for n in (0, 1)]
EVERYWHERE = SlurmJob("job", nodes=2, per="node", gpus=4)


@pytest.mark.parametrize("status", [0, 1, 143])
def test_a_job_that_ran_out_of_time_is_queued_again(cluster, tmp_path, status):
    cluster(status)
    script = batch_script(SlurmJob("job"), str(tmp_path), POINTS[:1])
    done = subprocess.run(["bash"], input=script, text=True, check=False)
    assert done.returncode == status
    log = (tmp_path / "log").read_text().splitlines()
    asked = [*POINTS[0][:4], "--gin_bindings=S = 'x0 y'", "--workdir=w0"]
    assert log[: 2 + len(asked)] == ["srun", "--kill-on-bad-exit=1", *asked]
    assert (log[-4:-1] == ["scontrol", "requeue", "77"]) is (status == 143)


def test_a_job_of_an_array_trains_its_own_point(cluster, tmp_path, monkeypatch):
    cluster(0)
    script = batch_script(EVERYWHERE, str(tmp_path), POINTS)
    assert "#SBATCH --array=0-1\n" in script
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    subprocess.run(["bash"], input=script, text=True, check=True)
    log = (tmp_path / "log").read_text()
    assert "--gin_bindings=S = 'x1 y'\n--workdir=w1\n" in log
    # One process for each node has to be told of all of its GPUs.
    assert "ids=0,1,2,3\n" in log


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_the_shell_is_clean(tmp_path):
    files = [*(ROOT / "experiments").rglob("*.sh"), *(ROOT / "scripts").glob("*.sh")]
    for number, job in enumerate((SlurmJob("job"), EVERYWHERE)):
        files.append(tmp_path / f"{number}.sh")
        files[-1].write_text(batch_script(job, str(tmp_path), POINTS[number:]))
    subprocess.run(["shellcheck", *map(str, files)], check=True)


def test_shell_scripts_are_well_formed():
    for file in ROOT.glob("experiments/**/*.sh"):
        subprocess.run(["bash", "-n", str(file)], check=True)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"nodes": 0}, "--nodes=0 must be 1 or more"),
        ({"per": "rack"}, "--per=rack must be one of gpu, node"),
        ({"cpus": 4}, "--cpus=4 is fewer than the 8 processes"),
    ],
)
def test_jobs_that_cannot_be(fields, words):
    with pytest.raises(UserError, match=words):
        SlurmJob("job", **fields)


def test_files_must_be_on_the_workers_too(tmp_path):
    other = tmp_path / "mine.gin"
    other.write_text("")
    with pytest.raises(UserError, match="is not a file of this repository"):
        check_travels([str(other)])


def test_a_batch_must_divide(monkeypatch):
    monkeypatch.chdir(ROOT)
    files = ["gin_configs/runs/pretrain.gin", "gin_configs/meshes/v4_128.gin"]
    assert check_run(files, [], SLICE.devices).mesh.fsdp == 64
    with pytest.raises(UserError, match="batch_size = 2050 is not a multiple"):
        check_run(files, ["BATCH_SIZE = 2050"], SLICE.devices)
