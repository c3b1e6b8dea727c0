"""Flags of the requested TPU slices, and of the limits on retries."""

from collections.abc import Sequence

from absl import flags

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from experiments.launch import name_flag  # noqa: F401
from experiments.launch.checks import ROOT, git_folder
from experiments.launch.commands import Command
from experiments.launch.tpu_keep import Patience, stop_runs
from experiments.launch.tpu_slice import SHARE, TpuSlice

cli.define_flags(TpuSlice, "zone", "topology", "share", "slices", "project", "spot")
cli.define_flags(TpuSlice, "reserved", "network", "subnetwork", "internal_ips", "iap")
cli.define_flags(TpuSlice, "service_account", "labels")
cli.define_flags(Patience)
STOP = flags.DEFINE_bool(
    "stop", False, "Save and end the runs in progress, and do nothing else."
)
DELETE = flags.DEFINE_bool(
    "delete", False, "Delete the slices at the end, also if training fails."
)


def tpu_slice(suffix: str = "") -> TpuSlice:
    """The slices that the flags request; a suffix distinguishes several requests."""
    name = cli.required("name") + suffix
    for flag in ("zone", "topology"):
        cli.required(flag)
    return TpuSlice(**{**cli.flag_values(TpuSlice), "name": name})


def patience() -> Patience:
    """The limits on retries that the flags set."""
    return Patience(**cli.flag_values(Patience))


def source_bundle() -> tuple[str, Command]:
    """The path of the source bundle, in the git directory, and the command for it."""
    bundle = f"{git_folder()}/bpd_jax_{cli.required('name')}.bundle"
    words = ("git", "-C", str(ROOT), "bundle", "create", bundle, "HEAD")
    return bundle, Command("pack the committed files", words)


def stop(tpus: Sequence[TpuSlice], *, dry_run: bool) -> None:
    """Saves and ends the runs on slices; absent slices are skipped.

    Raises:
      UserError: some could not be stopped.
    """
    if dry_run:
        print(*(tpu.stop() for tpu in tpus), sep="\n\n")
        return
    stop_runs(tpus)


def check_start(start: str | None) -> None:
    """Raises UserError if a run starts from a folder that the workers cannot read."""
    visible = (f"../{SHARE}/", "gs://") if flags.FLAGS.share else ("gs://",)
    if start and "/" in start and not start.startswith(visible):
        raise UserError(
            f"TrainConfig.start = {start!r} is not a folder of the workers: copy it to "
            f"the share and give its path there, such as ../{SHARE}/blockwise_1b5, or "
            "copy it to a bucket."
        )
