"""Runs any command on a SLURM allocation; training resumes after the time limit.

    python -m experiments.launch.slurm --nodes=4 --gpus=8 \\
        --sbatch=--partition=long --dry_run -- train \\
        --gin_file=gin_configs/runs/pretrain.gin \\
        --gin_file=gin_configs/meshes/gpu_8.gin --workdir=/shared/runs/blockwise_1b5

Without --dry_run the batch script is submitted to sbatch instead of printed. The
checkout, the interpreter and the command's folders must be on a disk that all nodes
share; the interpreter's jax must have a plugin for GPUs, which is checked here.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from absl import flags

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError, warn
from experiments.launch import command
from experiments.launch.command import RESUMED, Program
from experiments.launch.dry_run import DRY_RUN

flags.DEFINE_integer("nodes", 1, "Number of machines.", lower_bound=1)
flags.DEFINE_integer("gpus", 8, "GPUs of each machine.", lower_bound=1)
flags.DEFINE_enum(
    "per", "gpu", ["gpu", "node"], "One process for each GPU or each machine."
)
flags.DEFINE_integer(
    "grace", 300, "Seconds before the time limit at which training saves and exits."
)
flags.DEFINE_multi_string(
    "sbatch", [], "A further option of sbatch, such as --time=12:00:00."
)
cli.DEFINE_path("python", ".venv/bin/python", "Interpreter on the nodes.")


def batch_script(job: Any, programs: Sequence[Program]) -> str:
    """The text of the batch script, from flags; several commands make a job array.

    SLURM sends the script a signal before the time limit, the script sends training
    SIGTERM, and training saves a checkpoint and exits with 128 + 15 = 143. The job is
    then requeued, and the same command resumes. A command that would begin again gets
    no such signal and ends at the time limit. Without the signal of SLURM, status 143
    is an ordinary error: srun also terminates the other processes when one fails.
    """
    tasks = job.gpus if job.per == "gpu" else 1
    for option in job.sbatch:
        if not option.startswith("-") or "\n" in option:
            raise UserError(f"--sbatch={option} is not an option of sbatch.")
    alone = "give --nodes=1 --per=node"
    for program in programs:
        command.check(program, [job.nodes * job.gpus], 1, job.nodes * tasks, alone)
    resumes = all(program.module in RESUMED for program in programs)
    array = [f"--array=0-{len(programs) - 1}"] if len(programs) > 1 else []
    options = [
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={tasks}",
        f"--gpus-per-node={job.gpus}",
        *([f"--signal=B:USR1@{job.grace}"] if resumes else []),
        "--requeue" if resumes else "--no-requeue",
        *("--open-mode=append", *array, *job.sbatch),
    ]
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options)]
    lines += ["set -uo pipefail", f"cd {shlex.quote(str(command.ROOT))} || exit 1", ""]
    lines += ['case "${SLURM_ARRAY_TASK_ID:-0}" in']
    for number, program in enumerate(programs):
        lines += [f"{number}) command=({shlex.join(program.words(job.python))}) ;;"]
    lines += ["*) exit 1 ;;", "esac"]
    # SLURM_JOB_ID of one array job is the ID of the whole array.
    several = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    lines += [f'job="{several if array else "$SLURM_JOB_ID"}"']
    if job.per == "node" and job.nodes > 1:
        # By default jax uses one GPU for each process that SLURM starts.
        devices = ",".join(map(str, range(job.gpus)))
        lines += [f"export JAX_LOCAL_DEVICE_IDS={devices}"]
    return "\n".join([*lines, "", _RUN])


# jax discovers the other processes through SLURM. The time limit is signalled by USR1,
# because a user's scancel sends TERM, which must end the job for good. The script
# forwards it with scancel, as srun kills its tasks when it receives TERM itself.
_RUN = """\
[ -n "${SLURM_CPUS_PER_TASK-}" ] && export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# The time limit is near: training saves a checkpoint and exits.
asked="" again=yes
trap 'asked=yes again=yes; scancel --signal=TERM "$job"' USR1
srun --kill-on-bad-exit=1 "${command[@]}" &
srun=$!
# The signal interrupts wait.
while [ -n "$again" ]; do
    again=""
    wait "$srun"
    status=$?
done

# Training has saved: the requeued job resumes it.
if [ -n "$asked" ] && [ "$status" -eq 143 ]; then
    scontrol requeue "$job"
fi
exit "$status"
"""


def _unusable(python: str) -> str | None:
    """Why an interpreter cannot run on GPUs; None if its jax has a plugin for them."""
    words = [python, "-c", _PLUGINS]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, cwd=command.ROOT
        )
    except OSError as error:
        return f"--python={python} cannot be run: {error.strerror}."
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        return f"--python={python} has no jax: {last}."
    version, *plugins = done.stdout.split()
    if any(re.search("cuda|rocm", name) for name in plugins):
        return None
    return (
        f"--python={python} has jax {version} without a plugin for GPUs: install "
        "bpd_jax[cuda13] in it, or name another interpreter."
    )


# jax finds plugins as modules of a package, and as entry points.
_PLUGINS = """
import importlib.metadata, pkgutil
names = [x.name for x in importlib.metadata.entry_points(group="jax_plugins")]
try:
    import jax_plugins
    names += [x.name for x in pkgutil.iter_modules(jax_plugins.__path__)]
except ImportError:
    pass
print(importlib.metadata.version("jax"), *names)
"""


def submit(programs: Sequence[Program]) -> None:
    """Submits commands to sbatch as the flags say, or prints the script."""
    script = batch_script(flags.FLAGS, programs)
    reason = _unusable(flags.FLAGS.python)
    if DRY_RUN.value:
        print(script, end="")
        if reason is not None:
            warn(f"the job would be refused here: {reason}")
        return
    if reason is not None:
        raise UserError(reason)
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not installed: launch from a login node.")
    done = subprocess.run(["sbatch"], input=script, text=True, check=False)
    if done.returncode:
        raise UserError(f"sbatch rejected the job with status {done.returncode}.")


def main(words: list[str]) -> None:
    """Validates the command, then submits or prints the batch script."""
    submit([command.parse_program(words)])


if __name__ == "__main__":
    cli.run(main, positional=True)
