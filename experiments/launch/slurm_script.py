"""The batch script of a SLURM job, as text."""

import dataclasses
import re
import shlex
from collections.abc import Sequence
from typing import Annotated

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Count, Validated, choice


@dataclasses.dataclass(frozen=True)
class SlurmJob(Validated):
    """Resources requested by a job.

    Attributes:
      name: name of the job.
      nodes: number of machines.
      gpus: GPUs of each machine.
      per: whether to run one process for each GPU or for each machine.
      cpus: cores of each machine.
      time: time limit of one job, in sbatch's format.
      grace: seconds before that limit at which training saves a checkpoint and exits.
      sbatch: a further option of sbatch, such as `--partition=long`.
    """

    prefix = "--"

    name: str = "bpd_jax"
    nodes: Count = 1
    gpus: Count = 8
    per: Annotated[str, choice("gpu", "node")] = "gpu"
    cpus: Count = 64
    time: str = "24:00:00"
    grace: Count = 300
    sbatch: tuple[str, ...] = ()

    def check_together(self) -> None:
        """Raises a `UserError` unless sbatch accepts the fields."""
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise UserError(f"--name={self.name} must be letters, digits, . _ and -.")
        if self.cpus < self.tasks:
            raise UserError(
                f"--cpus={self.cpus} is fewer than the {self.tasks} processes of a "
                "node: give each at least one core."
            )
        for option in self.sbatch:
            if not option.startswith("-") or "\n" in option:
                raise UserError(
                    f"--sbatch={option} is not an option of sbatch: write it like "
                    "--sbatch=--partition=long."
                )

    @property
    def tasks(self) -> int:
        """Processes on each machine."""
        return self.gpus if self.per == "gpu" else 1

    @property
    def devices(self) -> tuple[int, ...]:
        """The number of devices that jax sees."""
        return (self.nodes * self.gpus,)


def batch_script(job: SlurmJob, folder: str, points: Sequence[Sequence[str]]) -> str:
    """The text of the batch script.

    SLURM sends the script a signal before the time limit, the script sends training
    SIGTERM, and training saves a checkpoint and exits with 128 + 15 = 143. The job is
    then requeued, and the same command resumes. Without the signal of SLURM, status 143
    is an ordinary error: srun also terminates the other processes when one fails.

    Args:
      job: requested resources.
      folder: path of the checkout, the same on all machines.
      points: commands that train; several make a job array with a job for each.
    """
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.tasks}",
        f"--gpus-per-node={job.gpus}",
        f"--cpus-per-task={job.cpus // job.tasks}",
        f"--time={job.time}",
        f"--signal=B:USR1@{job.grace}",
        "--requeue",
        "--open-mode=append",
        *([f"--array=0-{len(points) - 1}"] if len(points) > 1 else []),
        *job.sbatch,
    ]
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options)]
    lines += ["set -uo pipefail", f"cd {shlex.quote(folder)} || exit 1", ""]
    if len(points) == 1:
        lines += [f"command=({shlex.join(points[0])})", 'job="$SLURM_JOB_ID"']
    else:
        lines += ['case "$SLURM_ARRAY_TASK_ID" in']
        for number, words in enumerate(points):
            lines += [f"{number}) command=({shlex.join(words)}) ;;"]
        lines += ["*) exit 1 ;;", "esac"]
        # SLURM_JOB_ID of one array job is the ID of the whole array.
        lines += ['job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"']
    if job.per == "node" and job.nodes > 1:
        # By default jax uses one GPU for each process that SLURM starts.
        devices = ",".join(map(str, range(job.gpus)))
        lines += [f"export JAX_LOCAL_DEVICE_IDS={devices}"]
    return "\n".join([*lines, "", _TRAIN])


# jax discovers the other processes through SLURM. The time limit is signalled by USR1,
# because a user's scancel sends TERM, which must end the job for good. The script
# forwards it with scancel, as srun kills its tasks when it receives TERM itself.
_TRAIN = """\
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

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
