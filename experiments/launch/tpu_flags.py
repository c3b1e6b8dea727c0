"""Flags that say which TPU slices to request, and when to give up."""

from collections.abc import Sequence

from absl import flags

from bpd_jax import cli
from bpd_jax.errors import UserError
from experiments.launch.checks import ROOT, git_folder
from experiments.launch.commands import Command
from experiments.launch.name_flag import NAME
from experiments.launch.tpu_keep import Patience, stop_runs
from experiments.launch.tpu_slice import SHARE, TpuSlice

ZONE = flags.DEFINE_string("zone", None, "Zone, such as us-central2-b.")
PROJECT = flags.DEFINE_string("project", None, "Project; default: gcloud's own.")
TOPOLOGY = flags.DEFINE_string("topology", None, "Chip and sides, such as v4:4x4x4.")
SLICES = flags.DEFINE_integer("slices", 1, "Slices that train together (multislice).")
SPOT = flags.DEFINE_bool("spot", False, "Cheaper slices that Cloud may take back.")
RESERVED = flags.DEFINE_bool("reserved", False, "Slices of the project's reservation.")
NETWORK = flags.DEFINE_string("network", None, "Network of the VMs.")
SUBNETWORK = flags.DEFINE_string("subnetwork", None, "Subnetwork of the VMs.")
INTERNAL_IPS = flags.DEFINE_bool(
    "internal_ips", False, "VMs without addresses outside their network."
)
IAP = flags.DEFINE_bool("iap", False, "Connect through Identity-Aware Proxy.")
SERVICE_ACCOUNT = flags.DEFINE_string(
    "service_account", None, "Service account of the VMs."
)
LABELS = flags.DEFINE_list(
    "labels", [], "Labels of the VMs, such as team=nlp,run=base."
)
SHARED = flags.DEFINE_string(
    "share",
    None,
    "Folder that all workers mount, such as 10.0.0.2:/runs; not needed for runs under "
    "gs://.",
)
STOP = flags.DEFINE_bool(
    "stop", False, "Save and end the runs in progress, and do nothing else."
)
DELETE = flags.DEFINE_bool(
    "delete", False, "Give the slices back at the end, also if training fails."
)
RETRIES = flags.DEFINE_integer(
    "retries", 3, "Restarts, in six hours, after errors on slices that are there."
)
REQUESTS = flags.DEFINE_integer(
    "requests",
    288,
    "Refused requests, or failures to reach Cloud one after another, before giving up.",
)
PAUSE = flags.DEFINE_float("pause", 300, "Seconds between two attempts.")


def tpu_slice(suffix: str = "") -> TpuSlice:
    """The slices that the flags ask for; a suffix tells several requests apart."""
    return TpuSlice(
        cli.required(NAME.name) + suffix,
        cli.required("zone"),
        cli.required("topology"),
        SHARED.value,
        slices=SLICES.value,
        project=PROJECT.value,
        spot=SPOT.value,
        reserved=RESERVED.value,
        network=NETWORK.value,
        subnetwork=SUBNETWORK.value,
        internal_ips=INTERNAL_IPS.value,
        iap=IAP.value,
        service_account=SERVICE_ACCOUNT.value,
        labels=tuple(LABELS.value),
    )


def patience() -> Patience:
    """When the flags say to give up."""
    return Patience(RETRIES.value, REQUESTS.value, PAUSE.value)


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
    visible = (f"../{SHARE}/", "gs://") if SHARED.value else ("gs://",)
    if start and "/" in start and not start.startswith(visible):
        raise UserError(
            f"TrainConfig.start = {start!r} is not a folder of the workers: put it on "
            f"the share and name it as they see it, such as ../{SHARE}/blockwise_1b5, "
            "or into a bucket."
        )
