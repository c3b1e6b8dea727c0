"""Trains on a SLURM allocation; requeues the job at its time limit.

    python -m experiments.launch.slurm --name=paper --nodes=4 --gpus=8 \\
        --sbatch=--partition=long --gin_file=gin_configs/runs/pretrain.gin \\
        --gin_file=gin_configs/meshes/gpu_8.gin --workdir=/shared/runs/blockwise_1b5 \\
        --dry_run

Without --dry_run the batch script is submitted to sbatch instead of printed. The
checkout, its .venv and --workdir must be on a file system that all nodes share.
"""

import os

from absl import flags

from bpd_jax.base import cli
from experiments.launch import slurm_flags
from experiments.launch.checks import ROOT, check_run
from experiments.launch.commands import train_words
from experiments.launch.slurm_script import batch_script

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Check everything, print, submit nothing."
)


def main() -> None:
    """Validates the run, then submits or prints the batch script."""
    job = slurm_flags.job()
    gin_files, bindings = flags.FLAGS.gin_file, flags.FLAGS.gin_bindings
    workdir = cli.required("workdir")
    check_run(gin_files, bindings, job.devices)
    python = slurm_flags.PYTHON.value
    words = train_words(python, gin_files, bindings, workdir)
    script = batch_script(job, os.fspath(ROOT), [words])
    slurm_flags.submit(script, dry_run=DRY_RUN.value)


if __name__ == "__main__":
    cli.run(main)
