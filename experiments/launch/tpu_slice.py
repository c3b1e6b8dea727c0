"""Slices of Cloud TPU VMs: the commands that request, prepare, use and delete them.

Slices are requested as a *queued resource*, one request for one slice or for several
(multislice). All workers get the same commands and write checkpoints, to a bucket or to
a share. The source, the log and the lock of a run are local to a worker (worker.sh).
"""

import dataclasses
import hashlib
import math
import re
import shlex

from bpd_jax.base.chips import sides_of
from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Count, Validated
from experiments.launch.command import Command, Program

# By chip: Cloud's names of the chip and of its image, the units per chip of the number
# in an accelerator type such as v5litepod-256 (0: --type and --topology instead), and
# the numbers of jax devices per chip: by default the two cores form one (megacore).
KINDS = {
    "v4": ("v4", "tpu-ubuntu2204-base", 0, (1, 2)),
    "v4-megacore": ("v4", "tpu-ubuntu2204-base", 0, (1,)),
    "v5e": ("v5litepod", "v2-alpha-tpuv5-lite", 1, (1,)),
    "v5p": ("v5p", "v2-alpha-tpuv5", 2, (1, 2)),
    "v6e": ("v6e", "v2-alpha-tpuv6e", 1, (1,)),
}
# Exit statuses of worker.sh: another program is running, it failed, it was stopped.
BUSY, FAILED, STOPPED = 75, 76, 77
# ssh closes a connection without a response for two minutes; by default it waits for
# hours if the peer vanishes without closing it.
_ALIVE = ("-oServerAliveInterval=30", "-oServerAliveCountMax=4")
_BUNDLE = "bpd_jax.bundle"
_WORKER = "bash bpd_jax/experiments/launch/worker.sh"


@dataclasses.dataclass(frozen=True)
class TpuSlice(Validated):
    """A request for slices, and the configuration of their workers.

    Attributes:
      name: name of the request and of the slice; several are called NAME-0, NAME-1, ….
      zone: zone of Cloud, such as us-central2-b.
      topology: chip and topology of a slice, such as v4:4x4x4.
      share: folder that all workers mount as ../share and `runs`, such as
        10.0.0.2:/runs; not needed for runs under gs://.
      slices: slices that train together (multislice).
      gcloud: a further flag of `gcloud compute tpus queued-resources create`, such as
        `--spot`, `--valid-until-duration=6h` or `--labels=team=nlp`.
      ssh: a further flag of gcloud's `ssh` and `scp`, such as `--internal-ip`.
    """

    prefix = "--"

    name: str
    zone: str
    topology: str
    share: str | None = None
    slices: Count = 1
    gcloud: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()

    def check_together(self) -> None:
        """Checks that Cloud accepts the fields."""
        sides_of(self.topology)
        if self.chip not in KINDS:
            raise UserError(
                f"--topology={self.topology} is not a TPU: give {', '.join(KINDS)}."
            )
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,58}[a-z0-9])?", self.name):
            raise UserError(f"--name={self.name} must be a-z, 0-9 and -, at most 60.")
        if self.share and not re.fullmatch(r"(?!gs:)[^:\s]+:/\S*", self.share):
            raise UserError(f"--share={self.share} is not HOST:/FOLDER.")
        for flag in (*self.gcloud, *self.ssh):
            if not re.fullmatch(r"--[a-z][a-z-]*(=.*)?", flag):
                raise UserError(f"{flag} is not a flag: write --gcloud=--tags=mine.")

    @property
    def chip(self) -> str:
        """The name of the chip, such as `v4`."""
        return self.topology.partition(":")[0]

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of devices that jax may see, of all slices together."""
        chips = math.prod(sides_of(self.topology))
        return tuple(self.slices * chips * cores for cores in KINDS[self.chip][3])

    @property
    def hosts(self) -> int:
        """The number of machines, each of which runs a process.

        A host has four chips; eight of v5e and v6e may be on one.
        """
        sides = sides_of(self.topology)
        chips = math.prod(sides)
        most = 8 if len(sides) == 2 else 4
        return self.slices * (1 if chips <= most else chips // 4)

    @property
    def one_host(self) -> str:
        """A topology of this chip whose chips are those of one machine."""
        sides = "2x2" if len(sides_of(self.topology)) == 2 else "2x2x1"
        return f"--topology={self.chip}:{sides}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Cloud's names of the slices."""
        several = range(self.slices) if self.slices > 1 else ()
        return tuple(f"{self.name}-{number}" for number in several) or (self.name,)

    def check_folder(self, flag: str, folder: str) -> None:
        """Checks that the workers share a folder."""
        if folder.startswith("gs://"):
            return
        # On the workers `runs` is a link to the share.
        if not self.share or not re.match(r"(\.\./share|runs)/(?!.*\.\.)", folder):
            raise UserError(
                f"{flag}={folder} is not shared by the workers: give ../share/NAME and "
                "--share=HOST:/FOLDER, or a folder under gs://."
            )

    def create(self) -> Command:
        """Requests the slices."""
        kind, image, per_chip, _ = KINDS[self.chip]
        sides = sides_of(self.topology)
        if per_chip:
            chip = [f"--accelerator-type={kind}-{per_chip * math.prod(sides)}"]
        else:
            chip = [f"--type={kind}", f"--topology={'x'.join(map(str, sides))}"]
        if not any(flag.startswith("--runtime-version=") for flag in self.gcloud):
            chip.append(f"--runtime-version={image}")
        nodes = [f"--node-id={self.name}"]
        if self.slices > 1:
            nodes = [f"--node-count={self.slices}", f"--node-prefix={self.name}"]
        words = ("create", self.name, *chip, *nodes, *self.gcloud)
        return self._queued("request slices", *words)

    def delete(self, about: str = "delete the slices") -> Command:
        """Deletes the request and its slices."""
        return self._queued(about, "delete", self.name, "--force")

    def describe(self) -> Command:
        """Prints the request's state, such as WAITING_FOR_RESOURCES or ACTIVE."""
        format_ = "--format=value(state.state)"
        return self._queued("the state of the request", "describe", self.name, format_)

    def describe_node(self, node: str) -> Command:
        """Prints a slice's state, such as READY or PREEMPTED."""
        words = ("describe", node, "--format=value(state)")
        return self._queued("the state of a slice", *words, group="tpu-vm")

    def prepare(self, bundle: str) -> list[Command]:
        """Sets up the workers: source (a local git bundle), Python, packages, share.

        The commands are idempotent. While a run is in progress they end with BUSY.
        """
        setup = (
            f"git init -q bpd_jax && git -C bpd_jax fetch -q ../{_BUNDLE} HEAD && "
            "git -C bpd_jax checkout -q --detach FETCH_HEAD && "
            f"bash bpd_jax/experiments/launch/tpu_setup.sh {self.share or ''}"
        ).rstrip()
        lock = ["flock", "-w", "10", "-E", str(BUSY), "bpd_jax_run/lock"]
        script = f"mkdir -p bpd_jax_run && {shlex.join([*lock, 'bash', '-c', setup])}"
        target = ("scp", bundle, f"{self.name}:{_BUNDLE}", "--node=all", "--worker=all")
        alive = (f"--scp-flag={flag}" for flag in _ALIVE)
        return [
            self._queued("send the source to every worker", *target, *alive, *self.ssh),
            self._ssh("set up every worker", script),
        ]

    def copy_rows(self, program: Program, data: str | None) -> list[Command]:
        """Copies prepared rows from a bucket folder, if any, to the run's folder."""
        if not data:
            return []
        if not program.values("workdir"):
            raise UserError("--data is copied to a run: give the command a --workdir.")
        workdir = program.values("workdir")[-1]
        folder = shlex.quote(f"{workdir}/data")
        make = "" if workdir.startswith("gs://") else f"mkdir -p {folder} && "
        copy = f"{make}gcloud storage rsync -r {shlex.quote(data)} {folder}"
        script = f"{self._mounted()}cd bpd_jax && {copy}"
        return [self._ssh("copy prepared rows to the run", script, "0")]

    def start(self, program: Program, launch: str) -> Command:
        """Starts a command on every worker; after a stop, `launch` starts no other."""
        words = shlex.join(program.words(".venv/bin/python"))
        name = hashlib.blake2b(words.encode(), digest_size=6).hexdigest()
        script = shlex.join([name, launch, f"cd ~/bpd_jax && exec {words}"])
        about = f"start {program.module} on every worker"
        return self._ssh(about, f"{self._mounted()}{_WORKER} start {script}")

    def follow(self) -> Command:
        """Prints the log of the first worker until the run ends."""
        return self._ssh("follow the first worker's log", f"{_WORKER} follow", "0")

    def stop(self) -> Command:
        """Requests a checkpoint and shutdown."""
        return self._ssh("stop the run on every worker", f"{_WORKER} stop")

    def _mounted(self) -> str:
        # A restarted VM has not mounted the share until it is prepared again, and files
        # written to the empty mount point are lost.
        return "mountpoint -q share && " if self.share else ""

    def _ssh(self, about: str, script: str, worker: str = "all") -> Command:
        words = ("ssh", self.name, f"--node={worker}", f"--worker={worker}")
        alive = (f"--ssh-flag={flag}" for flag in _ALIVE)
        return self._queued(about, *words, f"--command={script}", *alive, *self.ssh)

    def _queued(
        self, about: str, *words: str, group: str = "queued-resources"
    ) -> Command:
        location = (f"--zone={self.zone}", "--quiet")
        return Command(about, ("gcloud", "compute", "tpus", group, *words, *location))
