"""Slices of Cloud TPU VMs: the commands that request, prepare, use and delete them.

Slices are requested as a *queued resource*, one request for one slice or for several
(multislice). Every worker gets the same commands; jax discovers the other workers. All
workers write checkpoints, so the run's folder is in a bucket, or on a share that all of
them mount (Filestore, or any NFS). The source, the log and the lock of a run are local
to each worker.
"""

import dataclasses
import itertools
import math
import re
import shlex
from typing import Annotated

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import TEXT, Count, Validated, each
from bpd_jax.compilation.chips import chip_of
from bpd_jax.storage import buckets
from experiments.launch.commands import Command
from experiments.launch.detached import BUSY

# By chip: Cloud's names of the chip and of its image, the units per chip of the number
# in an accelerator type, and the possible numbers of jax devices per chip: by default
# the two cores of a v4 or v5p chip form one device (megacore). In gcloud a v4 is
# requested by --type and --topology, all others by an accelerator type such as
# v5litepod-256.
KINDS = {
    "v4": ("v4", "tpu-ubuntu2204-base", 0, (1, 2)),
    "v4-megacore": ("v4", "tpu-ubuntu2204-base", 0, (1,)),
    "v5e": ("v5litepod", "v2-alpha-tpuv5-lite", 1, (1,)),
    "v5p": ("v5p", "v2-alpha-tpuv5", 2, (1, 2)),
    "v6e": ("v6e", "v2-alpha-tpuv6e", 1, (1,)),
}
# Topologies that Cloud offers, by the number of dimensions: the pages "TPU v4", "TPU
# v5p", "TPU v5e" and "TPU v6e" of its documentation. Further topologies of three
# dimensions have multiples of 4 in ascending order.
_SLICES = {
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4"),
}

SHARE = "share"  # mount point of the share, in the home folder
# Seconds for which the set-up waits for an earlier one before it exits with BUSY.
WAIT = 10
# ssh closes a connection without a response for two minutes; by default it waits for
# hours if the peer vanishes without closing it.
_ALIVE = ("-oServerAliveInterval=30", "-oServerAliveCountMax=4")
_BUNDLE = "bpd_jax.bundle"
_RUN = "bpd_jax_run"  # holds the lock and the log of a run
_SCRIPT = "bpd_jax/experiments/launch/detached.py"
_DETACHED = f"python3 {_SCRIPT} {_RUN}"
_BUCKETS = "gs://"


@dataclasses.dataclass(frozen=True)
class TpuSlice(Validated):
    """A request for slices, and the configuration of their workers.

    Attributes:
      name: name of the request and of the slice; several are called NAME-0, NAME-1, ….
      zone: zone of Cloud, such as us-central2-b.
      topology: chip and topology of a slice, such as v4:4x4x4.
      share: folder that all workers mount, such as 10.0.0.2:/runs; not needed for runs
        under gs://.
      slices: slices that train together, joined by the data centre's network
        (multislice).
      project: project of Cloud; by default gcloud's current project.
      spot: whether to request spot capacity, which is cheaper and can be preempted at
        any time.
      reserved: whether to use a reservation of the project.
      network: network of the VMs; by default the project's.
      subnetwork: subnetwork of the VMs; by default the project's.
      internal_ips: whether the VMs have internal IP addresses only.
      iap: whether to connect through Identity-Aware Proxy, which reaches such VMs from
        anywhere.
      service_account: service account of the VMs; by default the project's.
      labels: labels of the VMs, such as team=nlp,run=base.
    """

    prefix = "--"

    name: str
    zone: str
    topology: str
    share: str | None = None
    slices: Count = 1
    project: str | None = None
    spot: bool = False
    reserved: bool = False
    network: str | None = None
    subnetwork: str | None = None
    internal_ips: bool = False
    iap: bool = False
    service_account: str | None = None
    labels: Annotated[tuple[str, ...], each(TEXT, repeated=False)] = ()

    def check_together(self) -> None:
        """Raises a `UserError` unless Cloud accepts the fields."""
        _check_topology(self.topology)
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,58}[a-z0-9])?", self.name):
            raise UserError(
                f"--name={self.name} must be lower-case letters, digits and hyphens, "
                "at most 60, the first of them a letter."
            )
        if self.share is not None and not re.fullmatch(
            r"(?!gs:)[^:\s]+:/\S*", self.share
        ):
            raise UserError(
                f"--share={self.share} is not HOST:/FOLDER, the format of mount; runs "
                "under gs:// need no share."
            )
        if self.spot and self.reserved:
            raise UserError(
                "--spot and --reserved exclude each other: a reservation is billed and "
                "is not preempted."
            )
        for label in self.labels:
            if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}=[a-z0-9_-]{0,63}", label):
                raise UserError(
                    f"--labels={label} must be KEY=VALUE in lower-case letters, "
                    "digits, _ and -."
                )

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of devices that jax may see, of all slices together."""
        chip, _, sides = self.topology.partition(":")
        chips = math.prod(int(side) for side in sides.split("x"))
        return tuple(self.slices * chips * cores for cores in KINDS[chip][3])

    @property
    def nodes(self) -> tuple[str, ...]:
        """Cloud's names of the slices."""
        if self.slices == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(self.slices))

    def folder(self, flag: str, name: str) -> str:
        """The folder of a run, as its workers name it.

        Args:
          flag: that names the folder, for messages.
          name: a folder under gs://, or one within the share.

        Raises:
          UserError: it is neither, has no bucket, or there is no share.
        """
        if name.startswith(_BUCKETS):
            return str(buckets.as_path(name))
        if name.startswith("/") or ":" in name or ".." in name.split("/"):
            raise UserError(
                f"--{flag}={name} must be a folder under gs://, or one within the "
                "share, such as runs/base."
            )
        if self.share is None:
            raise UserError(
                f"--{flag}={name} is a folder within a share, but --share is missing: "
                f"give it, or a folder such as gs://BUCKET/{name}."
            )
        return f"../{SHARE}/{name}"

    def create(self) -> Command:
        """Requests the slices; Cloud provides them when capacity is available."""
        chip = self.topology.partition(":")[0]
        return self._queued(
            "request the slice" if self.slices == 1 else "request the slices",
            "create",
            self.name,
            *_accelerator(self.topology),
            f"--runtime-version={KINDS[chip][1]}",
            *(
                [f"--node-id={self.name}"]
                if self.slices == 1
                else [f"--node-count={self.slices}", f"--node-prefix={self.name}"]
            ),
            *self._flags("spot", "reserved", "network", "subnetwork"),
            *self._flags("internal_ips", "service_account", "labels"),
        )

    def _flags(self, *fields: str) -> list[str]:
        """gcloud's flags for the fields that are set."""
        words = []
        for field in fields:
            value = getattr(self, field)
            if value:
                text = ",".join(value) if isinstance(value, tuple) else value
                word = f"--{field.replace('_', '-')}"
                words.append(word if value is True else f"{word}={text}")
        return words

    def delete(self) -> Command:
        """Deletes the request and its slices."""
        return self._queued("delete the slices", "delete", self.name, "--force")

    def describe(self) -> Command:
        """Prints the request's state, such as WAITING_FOR_RESOURCES or ACTIVE."""
        return self._queued(
            "the state of the request",
            "describe",
            self.name,
            "--format=value(state.state)",
        )

    def describe_node(self, node: str) -> Command:
        """Prints a slice's state, such as READY or PREEMPTED."""
        about = "the state of a slice"
        words = ("tpu-vm", "describe", node, "--format=value(state)")
        return self._command(about, *words)

    def prepare(self, bundle: str) -> list[Command]:
        """Sets up the workers: source, Python, packages, the share.

        The commands are idempotent. While a run is in progress they end with BUSY.

        Args:
          bundle: local path of a git bundle of the source.
        """
        setup = (
            f"git init -q bpd_jax && git -C bpd_jax fetch -q ../{_BUNDLE} HEAD && "
            "git -C bpd_jax checkout -q --detach FETCH_HEAD && "
            "bash bpd_jax/experiments/launch/tpu_setup.sh"
        )
        if self.share:
            setup += f" {shlex.quote(self.share)}"
        lock = ["flock", "-w", str(WAIT), "-E", str(BUSY), f"{_RUN}/lock"]
        return [
            self._queued(
                "send the source to every worker",
                "scp",
                bundle,
                f"{self.name}:{_BUNDLE}",
                "--node=all",
                "--worker=all",
                *(f"--scp-flag={flag}" for flag in _ALIVE),
                *self._route(),
            ),
            self._ssh(
                "set up every worker",
                f"mkdir -p {_RUN} && {shlex.join([*lock, 'bash', '-c', setup])}",
            ),
        ]

    def copy_data(self, bucket: str, workdir: str) -> Command:
        """Copies prepared rows from a bucket into the run's folder, on one worker."""
        source = shlex.quote(bucket)
        if workdir.startswith(_BUCKETS):
            folder = shlex.quote(f"{self.folder('workdir', workdir)}/data")
            script = f"gcloud storage rsync -r {source} {folder}"
        else:
            folder = shlex.quote(f"{SHARE}/{workdir}/data")
            copy = f"gcloud storage rsync -r {source} {folder}"
            script = f"{self._mounted()}mkdir -p {folder} && {copy}"
        return self._ssh("copy prepared rows into the run's folder", script, worker="0")

    def start(
        self, words: tuple[str, ...], attempt: str, launch: str | None = None
    ) -> Command:
        """Starts a run on every worker, detached from this connection.

        Args:
          words: the command, relative to the checkout.
          attempt: ID of the run; a second start with the same ID does nothing.
          launch: prefix of the IDs of all runs of a launcher, followed by a hyphen: if
            one of them was stopped on request, the command ends with STOPPED. By
            default `attempt`, which no other run has.
        """
        program = ["bash", "-c", f"cd bpd_jax && exec {shlex.join(words)}"]
        ids = [attempt, attempt if launch is None else launch]
        return self._ssh(
            "start training on every worker",
            f"{self._mounted()}{_DETACHED} start {shlex.join([*ids, *program])}",
        )

    def follow(self, attempt: str = "") -> Command:
        """Prints the log of the first worker until the run ends."""
        return self._ssh(
            "follow the log of the first worker",
            f"{_DETACHED} follow {shlex.quote(attempt) if attempt else ''}".strip(),
            worker="0",
        )

    def running(self, worker: str = "0") -> Command:
        """Ends with BUSY if a run is in progress, else with 0.

        Args:
          worker: the first one, or `all`; those with a run print their names.
        """
        return self._ssh(
            "check whether a run is in progress",
            f"[ ! -e {_SCRIPT} ] || {_DETACHED} running",
            worker=worker,
        )

    def report(self) -> Command:
        """Prints the end of the log of every worker whose run failed."""
        return self._ssh("the logs of workers that failed", f"{_DETACHED} report")

    def fetch(self, folder: str) -> Command:
        """Prints an archive of the results of the runs in a folder of the share.

        Args:
          folder: parent of run folders. The archive contains the configuration, the
            metrics and the names of the checkpoints of each.
        """
        names = ("config.gin", "metrics.jsonl", "checkpoints/*")
        paths = " -o ".join(f"-path './*/{name}'" for name in names)
        return self._ssh(
            "fetch the results of the runs",
            f"cd {shlex.quote(f'{SHARE}/{folder}')} && find . -maxdepth 3 "
            f"\\( {paths} \\) -print0 | tar --null --no-recursion -czT - | base64",
            worker="0",
        )

    def stop(self) -> Command:
        """Requests a checkpoint and shutdown."""
        return self._ssh("stop the run on every worker", f"{_DETACHED} stop")

    def _mounted(self) -> str:
        """A prefix that ends a script unless the share is mounted.

        A restarted VM has not mounted it until it is prepared again, and files written
        to the empty mount point are lost.
        """
        return f"mountpoint -q {SHARE} && " if self.share else ""

    def _ssh(self, about: str, script: str, worker: str = "all") -> Command:
        node = "all" if worker == "all" else "0"
        return self._queued(
            about,
            "ssh",
            self.name,
            f"--node={node}",
            f"--worker={worker}",
            f"--command={script}",
            *(f"--ssh-flag={flag}" for flag in _ALIVE),
            *self._route(),
        )

    def _route(self) -> list[str]:
        if self.iap:
            return ["--tunnel-through-iap"]
        return ["--internal-ip"] if self.internal_ips else []

    def _queued(self, about: str, *words: str) -> Command:
        return self._command(about, "queued-resources", *words)

    def _command(self, about: str, *words: str) -> Command:
        project = [] if self.project is None else [f"--project={self.project}"]
        location = [f"--zone={self.zone}", *project, "--quiet"]
        return Command(about, ("gcloud", "compute", "tpus", *words, *location))


def _accelerator(topology: str) -> list[str]:
    """gcloud's flags for a chip and its topology."""
    chip, _, sides = topology.partition(":")
    kind, _, per_chip, _ = KINDS[chip]
    if not per_chip:
        return [f"--type={kind}", f"--topology={sides}"]
    count = per_chip * math.prod(int(side) for side in sides.split("x"))
    return [f"--accelerator-type={kind}-{count}"]


def _check_topology(topology: str) -> None:
    """Raises UserError unless Cloud offers such slices."""
    chip = chip_of(topology)
    text = topology.partition(":")[2]
    known = _SLICES[chip.dimensions]
    if text not in known and not (chip.dimensions == 3 and _is_of_cubes(text)):
        more = ", and multiples of 4 in ascending order" if chip.dimensions == 3 else ""
        raise UserError(
            f"--topology={topology} is not a slice that Cloud offers: {chip.name} has "
            f"{', '.join(known)}{more}."
        )
    # An accelerator type names a number of chips; of the possible shapes Cloud provides
    # the one nearest to a cube.
    if KINDS[chip.name][2] and text not in known:
        sides = [int(side) for side in text.split("x")]
        best = _nearest_cube(math.prod(sides))
        if sides != best:
            shape = "x".join(map(str, best))
            raise UserError(
                f"--topology={topology} cannot be requested: Cloud provides "
                f"{math.prod(sides)} chips of {chip.name} as {shape}."
            )


def _is_of_cubes(text: str) -> bool:
    """Whether a slice such as `4x4x8` consists of cubes of 4 × 4 × 4 chips."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}", text):
        return False
    sides = [int(side) for side in text.split("x")]
    return sides == sorted(sides) and not any(side % 4 for side in sides)


def _nearest_cube(chips: int) -> list[int]:
    """The sides, ascending, of the most cubic slice of cubes of 4 × 4 × 4 chips."""
    cubes = chips // 64
    shapes = (
        (a, b, cubes // (a * b))
        for a, b in itertools.product(range(1, cubes + 1), repeat=2)
        if cubes % (a * b) == 0 and a <= b <= cubes // (a * b)
    )
    return [4 * side for side in min(shapes, key=sum)]
