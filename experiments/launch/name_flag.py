"""The flag that all launchers share."""

from absl import flags

NAME = flags.DEFINE_string(
    "name", None, "Name of the SLURM job, or of the request for TPU slices."
)
