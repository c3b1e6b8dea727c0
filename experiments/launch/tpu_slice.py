"""A slice of Cloud TPU VMs: the commands that make, prepare, use and delete it.

Every worker gets the same commands (`--worker=all`); jax finds the others by itself.
The run's folder lies on a share that all workers mount (Filestore, or any NFS), because
all of them write checkpoints, which are renamed when they are whole.
"""

import dataclasses
import math
import re
import shlex

from bpd_jax.compilation.chips import chip_of
from bpd_jax.errors import UserError
from experiments.launch.commands import Command

# Cloud's name of a chip, its newest image, and the devices that jax may see on one: the
# two cores of a v4 or v5p chip act as one unless the compiler is told otherwise.
KINDS = {
    "v4": ("v4", "tpu-ubuntu2204-base", (1, 2)),
    "v4-megacore": ("v4", "tpu-ubuntu2204-base", (1,)),
    "v5e": ("v5litepod", "v2-alpha-tpuv5-lite", (1,)),
    "v5p": ("v5p", "v2-alpha-tpuv5", (1, 2)),
    "v6e": ("v6e", "v2-alpha-tpuv6e", (1,)),
}
# Slices that Cloud gives, by the number of sides: the pages "TPU v4", "TPU v5p", "TPU
# v5e" and "TPU v6e" of its documentation. Those of three sides go on with multiples of
# 4 in rising order.
_SLICES = {
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4"),
}

SHARE = "share"  # where it is mounted, in the home folder
# Exit status of a command that found an earlier one still at work on the slice.
BUSY = 75
# Seconds for which a command waits for the earlier one: few, because a command whose
# connection broke waits on and then starts, with nobody left to see what it prints.
WAIT = 600
_LOCK = "bpd_jax.lock"
_BUNDLE = "bpd_jax.bundle"
# A VM that was started anew has no share until it is prepared again, and what is
# written to the empty folder in its place is lost.
_MOUNTED = f"mountpoint -q {SHARE}"


@dataclasses.dataclass(frozen=True)
class TpuSlice:
    """Which slice, and what its workers need.

    Attributes:
      name: of the slice.
      zone: such as `us-central2-b`.
      topology: chip and sides, such as `v4:4x4x4`.
      share: what workers mount, such as `10.0.0.2:/runs`.
      project: None for the one that gcloud is set to.
      spot: whether Cloud may take it back at any time, at a lower price.
    """

    name: str
    zone: str
    topology: str
    share: str
    project: str | None = None
    spot: bool = False

    def __post_init__(self) -> None:
        _check_topology(self.topology)
        if not re.fullmatch(r"[^:\s]+:/\S*", self.share):
            raise UserError(
                f"--share={self.share} is not HOST:/FOLDER, as mount takes it."
            )

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of devices that jax may see."""
        chip, _, sides = self.topology.partition(":")
        chips = math.prod(int(side) for side in sides.split("x"))
        return tuple(chips * cores for cores in KINDS[chip][2])

    def create(self) -> Command:
        """Asks Cloud for the slice."""
        chip, _, sides = self.topology.partition(":")
        kind, image, _ = KINDS[chip]
        return self._command(
            "ask for the slice",
            "create",
            self.name,
            f"--type={kind}",
            f"--topology={sides}",
            f"--version={image}",
            *(["--spot"] if self.spot else []),
        )

    def delete(self) -> Command:
        """Gives the slice back, or what is left of it."""
        return self._command("give the slice back", "delete", self.name, "--quiet")

    def describe(self) -> Command:
        """Prints the slice's state, such as READY or PREEMPTED."""
        return self._command(
            "its state", "describe", self.name, "--format=value(state)"
        )

    def prepare(self, bundle: str) -> list[Command]:
        """What the workers need: source, Python, packages, the share.

        Done again it changes nothing. It waits for training that is still at work.

        Args:
          bundle: a git bundle of the source, here.
        """
        setup = (
            f"git init -q bpd_jax && git -C bpd_jax fetch -q ../{_BUNDLE} HEAD && "
            "git -C bpd_jax checkout -q --detach FETCH_HEAD && "
            f"bash bpd_jax/experiments/launch/tpu_setup.sh {shlex.quote(self.share)}"
        )
        return [
            self._command(
                "send the source to every worker",
                "scp",
                bundle,
                f"{self.name}:{_BUNDLE}",
                "--worker=all",
            ),
            self._ssh(
                "Python, packages and the share, on every worker",
                _alone(_LOCK, "bash", "-c", setup),
            ),
        ]

    def copy_data(self, bucket: str, workdir: str) -> Command:
        """Copies prepared rows from a bucket into the run's folder, on one worker."""
        folder = shlex.quote(f"{SHARE}/{workdir}/data")
        source = shlex.quote(bucket)
        return self._ssh(
            "prepared rows into the run's folder",
            f"{_MOUNTED} && mkdir -p {folder} && "
            f"gcloud storage rsync -r {source} {folder}",
            worker="0",
        )

    def train(self, words: tuple[str, ...]) -> Command:
        """Trains on every worker until it ends; a second one beside it waits."""
        return self._ssh(
            "train, on every worker",
            f"{_MOUNTED} && cd bpd_jax && {_alone(f'../{_LOCK}', *words)}",
        )

    def _ssh(self, about: str, script: str, worker: str = "all") -> Command:
        return self._command(
            about, "ssh", self.name, f"--worker={worker}", f"--command={script}"
        )

    def _command(self, about: str, *words: str) -> Command:
        project = [] if self.project is None else [f"--project={self.project}"]
        place = [f"--zone={self.zone}", *project]
        return Command(about, ("gcloud", "compute", "tpus", "tpu-vm", *words, *place))


def _alone(lock: str, *words: str) -> str:
    """A command that waits until no other one holds the lock, or ends with BUSY."""
    return shlex.join(["flock", "-w", str(WAIT), "-E", str(BUSY), lock, *words])


def _check_topology(topology: str) -> None:
    """Raises UserError unless Cloud gives such slices."""
    chip = chip_of(topology)
    text = topology.partition(":")[2]
    known = _SLICES[chip.dimensions]
    if text in known or (chip.dimensions == 3 and _is_of_cubes(text)):
        return
    more = ", and multiples of 4 in rising order" if chip.dimensions == 3 else ""
    raise UserError(
        f"--topology={topology} is no slice that Cloud gives: of {chip.name} there are "
        f"{', '.join(known)}{more}."
    )


def _is_of_cubes(text: str) -> bool:
    """Whether a slice such as `4x4x8` is made of cubes of 4 × 4 × 4 chips."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}", text):
        return False
    sides = [int(side) for side in text.split("x")]
    return sides == sorted(sides) and not any(side % 4 for side in sides)
