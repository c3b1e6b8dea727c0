"""Flags that say which TPU slices to request, and when to give up."""

from collections.abc import Sequence

from absl import flags

from bpd_jax import cli
from bpd_jax.errors import UserError
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
    "delete", False, "Give the slices back at the end, also if training fails."
)


def tpu_slice(suffix: str = "") -> TpuSlice:
    """The slices that the flags ask for; a suffix tells several requests apart."""
    name = cli.required("name") + suffix
    for flag in ("zone", "topology"):
        cli.required(flag)
    return TpuSlice(**{**cli.flag_values(TpuSlice), "name": name})


def patience() -> Patience:
    """When the flags say to give up."""
    return Patience(**cli.flag_values(Patience))


def source_bundle() -> tuple[str, Command]:
    """Where the source is packed, in git's own folder, and the command that does it."""
    bundle = f"{git_folder()}/bpd_jax_{cli.required('name')}.bundle"
    words = ("git", "-C", str(ROOT), "bundle", "create", bundle, "HEAD")
    return bundle, Command("pack what is committed", words)


def stop(tpus: Sequence[TpuSlice], *, dry_run: bool) -> None:
    """Saves and ends what runs on slices; those that are not there are skipped.

    Raises:
      UserError: some could not be stopped.
    """
    if dry_run:
        print(*(tpu.stop() for tpu in tpus), sep="\n\n")
        return
    stop_runs(tpus)


def check_start(start: str | None) -> None:
    """Raises UserError if a run starts from a folder that the workers cannot see."""
    visible = (f"../{SHARE}/", "gs://") if flags.FLAGS.share else ("gs://",)
    if start and "/" in start and not start.startswith(visible):
        raise UserError(
            f"TrainConfig.start = {start!r} is not a folder of the workers: put it on "
            f"the share and name it as they see it, such as ../{SHARE}/blockwise_1b5, "
            "or into a bucket."
        )
