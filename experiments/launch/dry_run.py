"""The flag that all launchers share."""

from absl import flags

DRY_RUN = flags.DEFINE_bool("dry_run", False, "Check everything, print, run nothing.")
