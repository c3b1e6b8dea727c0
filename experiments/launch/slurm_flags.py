"""Flags of the resources that a SLURM job requests."""

import subprocess

from absl import flags

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from experiments.launch import name_flag  # noqa: F401
from experiments.launch.slurm_script import SlurmJob

cli.define_flags(SlurmJob, "nodes", "gpus", "per", "cpus", "time", "grace", "sbatch")
PYTHON = flags.DEFINE_string("python", ".venv/bin/python", "Interpreter on the nodes.")


def job() -> SlurmJob:
    """The job that the flags describe."""
    return SlurmJob(**cli.flag_values(SlurmJob))


def submit(script: str, *, dry_run: bool) -> None:
    """Submits a script to sbatch, or prints it.

    Raises:
      UserError: sbatch is not installed or rejects the job.
    """
    if dry_run:
        print(script, end="")
        return
    try:
        done = subprocess.run(["sbatch"], input=script, text=True, check=False)
    except FileNotFoundError:
        raise UserError(
            "sbatch is not installed here: launch from a login node of the cluster."
        ) from None
    if done.returncode:
        raise UserError(f"sbatch rejected the job with status {done.returncode}.")
