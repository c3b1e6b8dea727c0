"""Flags that say what a SLURM job asks for."""

import subprocess

from absl import flags

from bpd_jax.errors import UserError
from experiments.launch.name_flag import NAME
from experiments.launch.slurm_script import PER, SlurmJob

NODES = flags.DEFINE_integer("nodes", 1, "Machines.")
GPUS = flags.DEFINE_integer("gpus", 8, "GPUs of each machine.")
PROCESSES = flags.DEFINE_enum("per", "gpu", PER, "One process for each GPU or node.")
CPUS = flags.DEFINE_integer("cpus", 64, "Cores of each machine.")
TIME = flags.DEFINE_string("time", "24:00:00", "Limit of one job.")
GRACE = flags.DEFINE_integer("grace", 300, "Seconds before it to save and stop.")
SBATCH = flags.DEFINE_multi_string("sbatch", [], "A further option of sbatch.")
PYTHON = flags.DEFINE_string("python", ".venv/bin/python", "Interpreter on the nodes.")


def job() -> SlurmJob:
    """What the flags say."""
    return SlurmJob(
        NAME.value or "bpd_jax",
        NODES.value,
        GPUS.value,
        PROCESSES.value,
        CPUS.value,
        TIME.value,
        GRACE.value,
        tuple(SBATCH.value),
    )


def submit(script: str, *, dry_run: bool) -> None:
    """Hands a script to sbatch, or prints it.

    Raises:
      UserError: sbatch is not there or refuses.
    """
    if dry_run:
        print(script, end="")
        return
    try:
        done = subprocess.run(["sbatch"], input=script, text=True, check=False)
    except FileNotFoundError:
        raise UserError(
            "there is no sbatch here: launch from a login node of the cluster."
        ) from None
    if done.returncode:
        raise UserError(f"sbatch refused the job with status {done.returncode}.")
