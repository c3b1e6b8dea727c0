"""Launches on SLURM and Cloud TPU, without either; the checks before any launch."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from bpd_jax.base.errors import UserError
from experiments.launch import command
from experiments.launch.command import TRAIN, Program, check, check_travels
from tests.commands import (
    assert_refused,
    commit_all,
    start,
    succeed,
    succeed_all,
    wait_for,
)

ROOT = pathlib.Path(__file__).parent.parent.parent
PRETRAIN = "--gin_file=gin_configs/runs/pretrain.gin"
HEADS = [
    *("train", "--gin_file=experiments/vicuna/heads.gin"),
    *("--gin.MODEL='../share/V'", "--gin.DATA='../share/texts'"),
]
RUN = ["--", "train", PRETRAIN, "--workdir=../share/w"]


def refuse(module, cases):
    for result, message in zip(start(module, *cases.values()), cases, strict=True):
        assert_refused(result, message)
        assert result.stderr.count("\n") == 1


def test_slurm_dry_run():
    mesh = "--gin_file=gin_configs/meshes/gpu_8.gin"
    train = ["--", "train", PRETRAIN, mesh]
    valid, evaluate = succeed_all(
        "experiments.launch.slurm",
        ["--nodes=4", "--sbatch=-p long", "--dry_run", *train, "--workdir=/w"],
        ["--per=node", "--dry_run", "--", "evaluate", "--model=/w"],
    )
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n" in valid.stdout
    assert "#SBATCH -p long\n" in valid.stdout
    assert "#SBATCH --signal=B:USR1@300\n" in valid.stdout
    assert "(.venv/bin/python -m bpd_jax.evaluate --model=/w)" in evaluate.stdout
    assert "#SBATCH --requeue\n" in valid.stdout
    assert "#SBATCH --no-requeue\n" in evaluate.stdout
    assert "--signal=B" not in evaluate.stdout  # It would begin again.
    several = "bpd_jax.report runs as one process, not as 8: give --nodes=1"
    cases = {
        "data × fsdp × model = -1 × 8 × 1, but there are 6": ["--gpus=6", *train],
        "TrainConfig.batch_size = 2048 is not a multiple of": ["--nodes=3", *train],
    }
    cases = {message: [*words, "--workdir=/w"] for message, words in cases.items()}
    cases["--workdir of bpd_jax.train is missing"] = train
    cases[several] = ["--", "report", "/w"]
    refuse("experiments.launch.slurm", cases)


@pytest.mark.parametrize(
    "modules, is_usable", [(["xla_cuda13"], True), (["other"], False), ([], False)]
)
def test_jobs_need_a_jax_for_gpus(cluster, tmp_path, monkeypatch, modules, is_usable):
    cluster(0)
    for name in modules:
        (tmp_path / "plugins" / "jax_plugins" / name).mkdir(parents=True)
        (tmp_path / "plugins" / "jax_plugins" / name / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "plugins"))
    words = [f"--python={sys.executable}", "--nodes=1", "--per=node"]
    result, absent, dry = start(
        "experiments.launch.slurm",
        [*words, "--", "tune", "--model=w"],
        ["--python=nowhere/python", *words[1:], "--", "tune", "--model=w"],
        [*words, "--dry_run", "--", "tune", "--model=w"],
    )
    assert_refused(absent, "--python=nowhere/python cannot be run: No such file")
    assert dry.returncode == 0
    assert ("without a plugin for GPUs" in dry.stderr) is not is_usable
    assert (tmp_path / "log").exists() is is_usable  # It is submitted.
    if not is_usable:
        assert_refused(result, "without a plugin for GPUs: install bpd_jax[cuda13]")


STUDY = ["--size", "paper", "--limit", "8", "--heartbeat_timeout", "8"]
TPU = ["--name=paper", "--zone=z", "--topology=v5e:4x4", "--dry_run"]
SHARE = "--share=10.0.0.2:/runs"


def test_tpu_dry_run_prints_the_commands():
    several = ["--slices=2", "--gcloud=--spot", "--gcloud=--runtime-version=x"]
    copied = ["--data=gs://BUCKET/rows", "--ssh=--internal-ip", SHARE]
    shared, bucket, evaluate, study, stop, deleted = succeed_all(
        "experiments.launch.tpu",
        [*TPU, *several, *copied, *RUN],
        [*TPU, "--", "train", PRETRAIN, "--workdir=gs://B/w"],
        [*TPU, "--", "evaluate", "--model=gs://B/w", "--output=gs://B/e"],
        [*TPU, SHARE, "--", "experiments.run", *STUDY, "--distributed", "table4"],
        [*TPU, "--stop"],
        [*TPU, "--delete", "--", "train", PRETRAIN, "--workdir=gs://B/w"],
    )
    assert "# delete the slices\n" in deleted.stdout
    assert "delete the slices" not in bucket.stdout
    assert "# if slices are preempted: delete them, then all" in bucket.stdout
    lines = [line for line in shared.stdout.splitlines() if line.startswith("gcloud")]
    verbs = [line.split()[4] for line in lines]
    describes = ["describe"] * 3
    steps = ["create", *describes, "scp", "ssh", "ssh", "ssh", "ssh", "delete"]
    assert verbs == steps
    create, _, _, node, scp, setup, rows, begin, follow, _ = lines
    assert "--accelerator-type=v5litepod-16 --node-count=2" in create
    assert create.endswith("--spot --runtime-version=x --zone=z --quiet")
    assert "tpu-vm describe paper-1 " in node
    assert "--internal-ip" in scp
    assert "tpu_setup.sh 10.0.0.2:/runs" in setup
    assert "gcloud storage rsync -r gs://BUCKET/rows ../share/w/data" in rows
    assert "mountpoint -q share && bash bpd_jax/experiments/launch/worker.sh" in begin
    assert "--workdir=../share/w --distributed" in begin
    # ssh ends a connection whose other end has gone.
    assert "--ssh-flag=-oServerAliveInterval=30" in follow
    assert "--node-id=paper --zone" in bucket.stdout
    assert "--runtime-version=v2-alpha-tpuv5-lite" in bucket.stdout
    assert "mountpoint" not in bucket.stdout
    assert "bpd_jax.evaluate --model=gs://B/w --output=gs://B/e --d" in evaluate.stdout
    # Words that are repeated stay.
    assert f"experiments.run {' '.join(STUDY)} --distributed table4" in study.stdout
    assert "worker.sh stop" in stop.stdout


def test_invalid_tpu_launches_are_refused():
    study, evaluate = ["--", "experiments.run"], ["--", "evaluate", "--model=gs://B/w"]
    prompts = ["--prompts_file=README.md", "--prompts_file=p.txt"]
    cases = {
        "--workdir=../share/w is not shared by the workers": RUN,
        "TrainConfig.start=mine/a is not shared": [
            *(SHARE, *RUN, "--gin.TrainConfig.start='mine/a'"),
        ],
        "drafter runs as one process, not as 4: give --slices=1": [
            *(SHARE, "--", *HEADS, "--workdir=gs://B/w"),
        ],
        "--output=/local is not shared by the workers": [
            *(SHARE, "--", "evaluate", "--model", "../share/x", "--output", "/local"),
        ],
        "--output=runs/smollm2 is not shared by the workers": [
            *("--", "evaluate", "--model=smollm2"),
        ],
        "--prompts_file=p.txt is not shared by the workers": [
            *(SHARE, "--", "decode", "--model=smollm2", *prompts),
        ],
        "--workdir=runs/paper/paper is not shared by the workers": [
            *(*study, "--publish", "table4", "--size", "paper"),
        ],
        "--workdir=gs://B/w: studies work in a folder on a disk": [
            *(*study, "table4", "--workdir=gs://B/w"),
        ],
        "--data is copied to a run": ["--data=gs://B/r", *evaluate],
        "-1 × 1 × 3, but there are 4 devices": [
            *("--topology=v4:2x2x1", *evaluate, "--gin.MeshConfig.model=3"),
        ],
        "StudyConfig has no parameter example": [
            *(*study, "all", "--gin.StudyConfig.example=3"),
        ],
        "nofile.gin, which does not exist": [
            *("--", "tune", "--model=gs://B/w", "--gin_file=nofile.gin"),
        ],
    }
    cases = {message: [*TPU, *words] for message, words in cases.items()}
    refuse("experiments.launch.tpu", cases)


# Trains until it is told to stop, and takes a moment to save.
_WORKS = """trap 'sleep 0.3; exit {status}' TERM
echo $$ > "{folder}/started"
while true; do sleep 0.02; done
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder with fake SLURM commands; each logs its arguments."""

    def make(status, works=False):
        """`works`: srun goes on until scancel passes TERM on to what it started."""
        srun = _WORKS if works else "exit {status}"
        for name, commands in (
            ("srun", srun.format(status=status, folder=tmp_path)),
            ("scancel", f'kill -TERM "$(cat "{tmp_path}/started")"'),
            ("scontrol", ""),
            ("sbatch", ""),
        ):
            file = tmp_path / name
            file.write_text(
                f'#!/usr/bin/env bash\nprintf "%s\\n" {name} "$@" '
                '"ids=${JAX_LOCAL_DEVICE_IDS-} cpus=${SRUN_CPUS_PER_TASK-}" '
                f'>> "{tmp_path}/log"\n{commands}\n'
            )
            file.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")

    return make


def script_of(*words, module="experiments.launch.slurm"):
    return succeed(module, "--per=node", "--grace=60", "--dry_run", *words).stdout


SINGLE = ("--python=python", "--", "tune", "--prompt=x y")


# srun also exits with 143 when one process fails and it terminates the others: a job
# that was not asked to stop must not be requeued.
@pytest.mark.parametrize("status", [0, 143])
def test_job_that_ends_by_itself_is_not_requeued(cluster, tmp_path, status):
    cluster(status)
    result = subprocess.run(["bash"], input=script_of(*SINGLE), text=True, check=False)
    assert result.returncode == status
    words = ["python", "-m", "bpd_jax.tune", "--prompt=x y"]
    log = (tmp_path / "log").read_text().splitlines()
    assert log == ["srun", "--kill-on-bad-exit=1", *words, "ids= cpus=8"]


def _signal(script, tmp_path, number):
    file = tmp_path / "job.sh"
    file.write_text(script)
    with subprocess.Popen(["bash", str(file)], start_new_session=True) as shell:
        try:
            started = tmp_path / "started"
            wait_for(lambda: started.exists() and started.read_text())
            shell.send_signal(number)
            return shell.wait(timeout=30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)


@pytest.mark.parametrize("status", [143, 1])
def test_job_of_an_array_at_its_time_limit_is_requeued(
    cluster, tmp_path, monkeypatch, status
):
    cluster(status, works=True)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    sweep = ["--sweep=heads", "--launcher=slurm", "--nodes=2", "--gpus=4"]
    script = script_of(*sweep, module="experiments.sweeps.run")
    script = script.rpartition("# 0 of 3 points")[0]
    assert "#SBATCH --signal=B:USR1@60\n" in script
    assert "#SBATCH --array=0-2\n" in script
    assert _signal(script, tmp_path, signal.SIGUSR1) == status
    log = (tmp_path / "log").read_text()
    assert "\n--gin_bindings=HEADS = 6\n" in log
    # A process has all GPUs of its node.
    assert "\nids=0,1,2,3 cpus=8\n" in log
    assert "\nscancel\n--signal=TERM\n77_1\n" in log
    assert ("\nscontrol\nrequeue\n77_1\n" in log) is (status == 143)


def test_cancelled_job_is_not_requeued(cluster, tmp_path):
    cluster(143, works=True)
    script = script_of(*SINGLE)
    assert _signal(script, tmp_path, signal.SIGTERM) == -signal.SIGTERM
    assert "requeue" not in (tmp_path / "log").read_text()


def test_shell_scripts_are_well_formed():
    files = [*(ROOT / "experiments").rglob("*.sh"), *(ROOT / "scripts").glob("*.sh")]
    for file in files:
        subprocess.run(["bash", "-n", str(file)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", *map(str, files)], check=True)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a gin file that includes one that is not committed."""
    (tmp_path / "mine.gin").write_text("include 'other.gin'\nBATCH_SIZE = 1024\n")
    commit_all(tmp_path)
    (tmp_path / "other.gin").write_text("STEPS = 5\n")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_must_be_committed(checkout):
    with pytest.raises(UserError, match="is not a file of this repository"):
        check_travels([str(checkout / "mine.gin")])
    check_travels(["mine.gin"])
    arguments = (PRETRAIN, "--gin_file=mine.gin", "--workdir=w")
    files = check(Program(TRAIN, arguments), [1])
    with pytest.raises(UserError, match=r"other\.gin is not a file of this repository"):
        check_travels(files[files.index("mine.gin") :])
    (checkout / "mine.gin").write_text("")
    with pytest.raises(UserError, match=r"mine\.gin has uncommitted changes"):
        check_travels(["mine.gin"])
