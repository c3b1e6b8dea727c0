"""Launches on SLURM, and the validation before any launch."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess

import pytest

from bpd_jax.base.errors import UserError
from experiments.launch import checks
from experiments.launch.checks import check_run, check_travels, git_folder
from experiments.launch.commands import train_words
from experiments.launch.slurm_script import SlurmJob, batch_script
from tests.commands import assert_refused, start, wait_for

ROOT = pathlib.Path(__file__).parent.parent.parent
PRETRAIN = "--gin_file=gin_configs/runs/pretrain.gin"


def test_slurm_dry_run():
    mesh = "--gin_file=gin_configs/meshes/gpu_8.gin"
    valid, *invalid = start(
        "experiments.launch.slurm",
        [PRETRAIN, mesh, "--workdir=/w", "--nodes=4", "--sbatch=-p long", "--dry_run"],
        [PRETRAIN, mesh, "--workdir=/w", "--gpus=6", "--dry_run"],
        [PRETRAIN, mesh, "--workdir=/w", "--nodes=3", "--dry_run"],
        [PRETRAIN, mesh, "--workdir=/w", "--sbatch=long", "--dry_run"],
        [PRETRAIN, mesh, "--workdir=/w", "--name=a b", "--dry_run"],
        [PRETRAIN, mesh, "--dry_run"],
    )
    assert valid.returncode == 0, valid.stderr
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n" in valid.stdout
    assert "#SBATCH -p long\n" in valid.stdout
    for result, message in zip(
        invalid,
        [
            "MeshConfig asks for data × fsdp × model = -1 × 8 × 1, but there are 6",
            "TrainConfig.batch_size = 2048 is not a multiple of",
            "--sbatch=long is not an option of sbatch",
            "--name=a b",
            "--workdir is missing",
        ],
        strict=True,
    ):
        assert_refused(result, message)
        assert result.stderr.count("\n") == 1


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


POINTS = [train_words("python", ["a.gin"], [f"S = 'x{n} y'"], f"w{n}") for n in (0, 1)]
EVERYWHERE = SlurmJob("job", nodes=2, per="node", gpus=4)


# srun also exits with 143 when one process fails and it terminates the others: a job
# that was not asked to stop must not be requeued.
@pytest.mark.parametrize("status", [0, 1, 143])
def test_job_that_ends_by_itself_is_not_requeued(cluster, tmp_path, status):
    cluster(status)
    script = batch_script(SlurmJob("job"), str(tmp_path), POINTS[:1])
    result = subprocess.run(["bash"], input=script, text=True, check=False)
    assert result.returncode == status
    arguments = [*POINTS[0][:4], "--gin_bindings=S = 'x0 y'", "--workdir=w0"]
    log = (tmp_path / "log").read_text().splitlines()
    assert log == ["srun", "--kill-on-bad-exit=1", *arguments, "ids= cpus=8"]


def _signal(script, tmp_path, number):
    """The status of a script that gets a signal while its srun works."""
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


@pytest.mark.parametrize("status", [143, 1, 0])
def test_job_at_its_time_limit_is_requeued(cluster, tmp_path, status):
    cluster(status, works=True)
    script = batch_script(SlurmJob("job", grace=60), str(tmp_path), POINTS[:1])
    assert "#SBATCH --signal=B:USR1@60\n" in script
    assert _signal(script, tmp_path, signal.SIGUSR1) == status
    log = (tmp_path / "log").read_text()
    assert "\nscancel\n--signal=TERM\n77\n" in log
    assert ("\nscontrol\nrequeue\n77\n" in log) is (status == 143)


def test_cancelled_job_is_not_requeued(cluster, tmp_path):
    cluster(143, works=True)
    script = batch_script(SlurmJob("job"), str(tmp_path), POINTS[:1])
    assert _signal(script, tmp_path, signal.SIGTERM) == -signal.SIGTERM
    assert "requeue" not in (tmp_path / "log").read_text()


def test_only_the_interrupted_job_of_an_array_is_requeued(
    cluster, tmp_path, monkeypatch
):
    cluster(143, works=True)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    script = batch_script(EVERYWHERE, str(tmp_path), POINTS)
    assert _signal(script, tmp_path, signal.SIGUSR1) == 143
    log = (tmp_path / "log").read_text()
    assert "\nscancel\n--signal=TERM\n77_1\n" in log
    assert "\nscontrol\nrequeue\n77_1\n" in log


def test_job_of_an_array_trains_its_own_point(cluster, tmp_path, monkeypatch):
    cluster(0)
    script = batch_script(EVERYWHERE, str(tmp_path), POINTS)
    assert "#SBATCH --array=0-1\n" in script
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    subprocess.run(["bash"], input=script, text=True, check=True)
    log = (tmp_path / "log").read_text()
    assert "--gin_bindings=S = 'x1 y'\n--workdir=w1\n" in log
    # One process per node has to be given all GPUs of the node.
    assert "ids=0,1,2,3 cpus=8\n" in log


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_shell_scripts_pass_shellcheck(tmp_path):
    files = [*(ROOT / "experiments").rglob("*.sh"), *(ROOT / "scripts").glob("*.sh")]
    for number, job in enumerate((SlurmJob("job"), EVERYWHERE)):
        files.append(tmp_path / f"{number}.sh")
        files[-1].write_text(batch_script(job, str(tmp_path), POINTS[number:]))
    subprocess.run(["shellcheck", *map(str, files)], check=True)


def test_shell_scripts_are_well_formed():
    patterns = {"experiments": "**/*.sh", "scripts": "*.sh"}
    for folder, pattern in patterns.items():
        files = sorted((ROOT / folder).glob(pattern))
        assert files
        for file in files:
            subprocess.run(["bash", "-n", str(file)], check=True)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"nodes": 0}, "--nodes must be a positive integer, not 0"),
        ({"per": "rack"}, "--per must be one of gpu, node"),
        ({"cpus": 4}, "--cpus=4 is fewer than the 8 processes"),
    ],
)
def test_invalid_jobs_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        SlurmJob("job", **fields)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A worktree with a gin file that includes one that is not committed."""
    main, tree = tmp_path / "main", tmp_path / "tree"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(main)]
    main.mkdir()
    (main / "mine.gin").write_text("include 'other.gin'\nBATCH_SIZE = 1024\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *arguments], check=True)
    subprocess.run([*git, "worktree", "add", "-q", str(tree)], check=True)
    (tree / "other.gin").write_text("STEPS = 5\n")
    monkeypatch.setattr(checks, "ROOT", tree)
    monkeypatch.chdir(tree)
    return tree


def test_files_must_be_committed(tmp_path, checkout):
    outside = tmp_path / "theirs.gin"
    outside.write_text("")
    with pytest.raises(UserError, match="is not a file of this repository"):
        check_travels([str(outside)])
    check_travels(["mine.gin"])
    files = ["gin_configs/runs/pretrain.gin", "mine.gin"]
    files_read = check_run(files, [], (1,)).files
    with pytest.raises(UserError, match=r"other\.gin is not a file of this repository"):
        check_travels(files_read[files_read.index("mine.gin") :])
    (checkout / "mine.gin").write_text("")
    with pytest.raises(UserError, match=r"mine\.gin has uncommitted changes"):
        check_travels(["mine.gin"])


def test_git_folder_of_a_worktree(tmp_path, checkout):
    folder = pathlib.Path(git_folder())
    assert folder.is_absolute()
    assert folder.is_relative_to(tmp_path / "main" / ".git" / "worktrees")


def test_batch_size_must_be_divisible_by_the_devices(monkeypatch):
    monkeypatch.chdir(ROOT)
    files = ["gin_configs/runs/pretrain.gin", "gin_configs/meshes/v4_128.gin"]
    assert check_run(files, [], (64, 128)).value.mesh.fsdp == 64
    with pytest.raises(UserError, match="only the data axis may cross"):
        check_run(files, [], (64,), slices=2)
    assert check_run(files, [], (128,), slices=2).value.mesh.fsdp == 64
    with pytest.raises(UserError, match="batch_size = 2050 is not a multiple"):
        check_run(files, ["BATCH_SIZE = 2050"], (64, 128))
